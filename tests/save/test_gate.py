"""The gate: a seized state stays, an update that has begun ends, and steps are timed."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from rekindle.memory.status import DONE, STABLE, UPDATING, StatusPage, read_status
from rekindle.save import gate
from rekindle.save.gate import Gate


class Clock:
    """Stands in for the module ``time``: it goes on when somebody sleeps."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def monotonic_ns(self) -> int:
        return int(self.now * 1e9)

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(gate, "time", clock)
    return clock


def gate_at(path: Path, step: int = 3) -> Gate:
    return Gate(StatusPage(path / "page", 1), step)


def test_an_update_waits_while_the_state_is_seized(tmp_path: Path) -> None:
    gate = gate_at(tmp_path)
    assert gate.seize(1.0) == 3
    trainer = threading.Thread(target=gate.updating, args=(3,), daemon=True)
    trainer.start()
    trainer.join(0.1)
    assert trainer.is_alive() and gate.phase == STABLE
    gate.release()
    trainer.join(60)
    assert not trainer.is_alive() and gate.phase == UPDATING


def test_an_update_that_has_begun_is_waited_for(tmp_path: Path) -> None:
    gate = gate_at(tmp_path)
    gate.updating(3)
    assert gate.seize(0.05) is None

    def end() -> None:
        time.sleep(0.1)
        gate.stepping(3)
        gate.stable(4, 3)

    threading.Thread(target=end).start()
    assert gate.seize(60.0) == 4


def test_a_trainer_that_raised_in_its_update_is_not_waited_for(tmp_path: Path) -> None:
    gate = gate_at(tmp_path)
    gate.updating(3)
    gate.end(well=False)
    began = time.monotonic()
    assert gate.seize(100.0) is None
    assert time.monotonic() - began < 60


def test_only_a_later_step_will_do(tmp_path: Path) -> None:
    gate = gate_at(tmp_path)
    assert gate.seize(0.05, beyond=3) is None
    gate.stable(4, 4)
    assert gate.seize(0.05, beyond=3) == 4


def test_the_page_tells_and_pauses_do_not_count(tmp_path: Path, clock: Clock) -> None:
    gate = gate_at(tmp_path, 0)
    for step in (1, 2, 3):
        gate.updating(step - 1)
        clock.sleep(0.02)
        gate.stable(step, step)
    page = read_status(tmp_path / "page")
    assert page.step == page.snapshot == 3 and 0.019 < page.longest < 0.021
    with gate.pause("evaluation"):
        page = read_status(tmp_path / "page")
        assert page.paused and page.note == "evaluation"
        clock.sleep(0.3)
    gate.stable(4, 4)
    page = read_status(tmp_path / "page")
    assert not page.paused and page.note == "" and page.longest < 0.021
    gate.end(well=True)
    assert read_status(tmp_path / "page").phase == DONE


def test_steps_that_all_have_a_pause_are_learned_from_without_it(tmp_path: Path, clock: Clock) -> None:
    """A job that waits for storage at each step has a watchdog too."""
    gate = gate_at(tmp_path, 0)
    for step in (1, 2):
        clock.sleep(0.02)
        with gate.pause("storage"), gate.pause("more of it"):
            clock.sleep(0.5)
        gate.stable(step, step)
    assert 0.019 < read_status(tmp_path / "page").longest < 0.021


def test_the_end_of_a_pause_within_a_pause_is_not_the_end(tmp_path: Path) -> None:
    gate = gate_at(tmp_path)
    with gate.pause("evaluation"):
        with gate.pause("storage"):
            assert read_status(tmp_path / "page").note == "storage"
        page = read_status(tmp_path / "page")
        assert page.paused and page.note == "evaluation"
    assert not read_status(tmp_path / "page").paused


def test_before_an_update_is_called_once_however_many_optimizers_there_are(tmp_path: Path) -> None:
    told: list[int] = []
    gate = Gate(StatusPage(tmp_path / "page", 1), 3, before_update=told.append)
    gate.updating(3)
    gate.updating(3)
    gate.stepping(3)
    gate.stable(4, 3)
    gate.updating(3)
    assert told == [4, 5]


def test_an_update_of_one_rank_alone_is_waited_for_by_nobody_and_leaves_that_to_the_next(tmp_path: Path) -> None:
    told: list[int] = []
    gate = Gate(StatusPage(tmp_path / "page", 1), 3, before_update=told.append)
    assert gate.updating(3, together=False) == 4 and not told and gate.phase == UPDATING
    assert gate.updating(3) is None and told == [4]
    gate.updating(3, together=False)
    gate.updating(3)
    assert told == [4]
