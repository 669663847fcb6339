"""A program written for mindio_ttp, whose ranks really fail: callbacks in order, one name, the same bits in the end."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from rekindle.storage.incidents import load_incidents
from rekindle.storage.posix import PosixStore
from tests.provide.mindio_ttp.programs import Run, begin

pytestmark = pytest.mark.timeout(600)  # four ranks start twice, on two cores that may have other work

AT = 5
"""The step in which the client's faults strike."""


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Run]:
    """Runs without a fault, one for each number of ranks."""

    @cache
    def of(world: int) -> Run:
        run = begin(tmp_path_factory.mktemp("unbroken") / str(world), world)
        assert run.finish() == 0, run.output
        return run

    return of


def check_dump(run: Run, world: int, step: int, writers: int) -> None:
    """Asserts that ``step`` was dumped by so many ranks, all callbacks in order, and loaded by the next start."""
    assert run.events("strike"), "the fault has not happened"
    if run.events("strike")[0]["fault"] == "kill":
        (incident, *_), _ = load_incidents(PosixStore(run.place / "root"))
        assert incident.cause in ("signal", "exit"), "noticed by its silence, not by its end"
    saves = run.events("save")
    assert [event["step"] for event in saves] == [step] * writers
    ranks = [event["rank"] for event in saves]
    assert len(set(ranks)) == writers
    assert {tuple(sorted(event["info"]["ranks"])) for event in saves} == {tuple(sorted(ranks))}
    (rename,) = run.events("rename")
    assert rename["step"] == step and rename["parts"] == [f"shard-{at}.pt" for at in range(writers)]
    assert max(event["at"] for event in run.events("saved")) < rename["at"], "a part came after the name"
    assert all(event["at"] > rename["at"] for event in run.events("exit")), "a rank ended before the name was given"
    assert run.events("exit") and not run.events("never")
    assert [event["step"] for event in run.events("loaded")] == [step] * world


def check_end(run: Run, unbroken: Run) -> None:
    """Asserts that all ranks have ended with the bits of the run without a fault."""
    assert run.ends() == unbroken.ends()


def generator_after(run: Run, step: int) -> str:
    (found,) = {event["generator"] for event in run.events("step") if event["step"] == step}
    return str(found)


@pytest.mark.campaign(seconds=30)
def test_a_rank_killed_in_its_update(tmp_path: Path) -> None:
    """The survivor completes the step, and is the only one that has it."""
    broken = begin(tmp_path / "broken", 2, "kill", "update", 1)
    whole = begin(tmp_path / "whole", 2)
    assert whole.finish() == 0, whole.output
    assert broken.finish() == 0, broken.output
    check_dump(broken, 2, AT, 1)
    check_end(broken, whole)
    assert [event["generator"] for event in broken.events("save")] == [generator_after(whole, AT)]


CELLS = [
    # fault, moment, victims, step that is dumped (None: that of the moment or a later one), ranks that write it
    ("raise", "forward", "1", AT - 1, 1),
    ("raise", "update", "1", AT, 1),
    ("report", "forward", "1", AT - 1, 1),
    ("kill", "forward", "1", AT - 1, 1),
    ("kill", "forward", "0", AT - 1, 1),
]
CELLS_OF_FOUR = [
    ("raise", "forward", "1", AT - 1, 2),
    ("kill", "forward", "0", AT - 1, 2),
    ("kill", "update", "3", AT, 2),
    ("kill", "update", "1,2", AT, 2),
]
NAMES = "fault, moment, victims, step, writers"


@pytest.mark.campaign(seconds=20)
@pytest.mark.parametrize(NAMES, CELLS)
def test_two_ranks(
    tmp_path: Path, unbroken: Callable[[int], Run], fault: str, moment: str, victims: str, step: int, writers: int
) -> None:
    _run_cell(tmp_path, unbroken(2), 2, fault, moment, victims, step, writers)


@pytest.mark.campaign(seconds=30)
@pytest.mark.parametrize(NAMES, CELLS_OF_FOUR)
def test_four_ranks(
    tmp_path: Path, unbroken: Callable[[int], Run], fault: str, moment: str, victims: str, step: int, writers: int
) -> None:
    _run_cell(tmp_path, unbroken(4), 4, fault, moment, victims, step, writers)


def _run_cell(
    tmp_path: Path, whole: Run, world: int, fault: str, moment: str, victims: str, step: int, writers: int
) -> None:
    run = begin(tmp_path / "run", world, fault, moment, victims, pause=0.3)
    assert run.finish() == 0, run.output
    check_dump(run, world, step, writers)
    check_end(run, whole)
    assert {event["generator"] for event in run.events("save")} == {generator_after(whole, step)}


@pytest.mark.campaign(seconds=25)
@pytest.mark.parametrize("world", [2, 4])
def test_sigterm(tmp_path: Path, unbroken: Callable[[int], Run], world: int) -> None:
    """Training goes on for as long as it takes to hear of it: the step of the moment or a later one is dumped."""
    run = begin(tmp_path / "run", world, "term", "forward", 1, pause=0.3)
    assert run.finish() == 0, run.output
    step = run.events("rename")[0]["step"]
    assert AT - 1 <= step < 8
    check_dump(run, world, step, world // 2)
    check_end(run, unbroken(world))


@pytest.mark.campaign(seconds=90)
@pytest.mark.parametrize("world", [2, 4])
def test_a_hang(tmp_path: Path, unbroken: Callable[[int], Run], world: int) -> None:
    """No progress for 60 s is a fault. The rank that hangs can save, as its state is that of a step."""
    run = begin(tmp_path / "run", world, "hang", "forward", 1, pause=0.3)
    assert run.finish() == 0, run.output
    check_dump(run, world, AT - 1, world // 2)
    check_end(run, unbroken(world))


@pytest.mark.campaign(seconds=25)
def test_stop_and_clean_come_before_the_save(tmp_path: Path) -> None:
    run = begin(tmp_path / "run", 2, "kill", "forward", 1, pause=0.3, TTP_STOP_CLEAN_BEFORE_DUMP="1")
    assert run.finish() == 0, run.output
    found = run.events("stop", "clean", "save", "rename", "exit")
    assert [event["event"] for event in found] == ["stop", "clean", "save", "rename", "exit"]
    assert found[1]["uce"] is False
    assert run.events("loaded")


@pytest.mark.campaign(seconds=35)
def test_a_second_death_in_the_dump(tmp_path: Path, unbroken: Callable[[int], Run]) -> None:
    """The first writer dies while it saves: the holder of the same shards in the other half writes in its place."""
    run = begin(tmp_path / "run", 4, "kill-twice", "forward", 3, pause=0.3)
    assert run.finish() == 0, run.output
    tries = [(event["rank"], event["info"]["ranks"]) for event in run.events("save")]
    assert sorted(tries) == [(0, [0, 1]), (1, [0, 1]), (1, [2, 1]), (2, [2, 1])]
    (rename,) = run.events("rename")
    last = {event["rank"]: event["at"] for event in run.events("saved")}
    assert last.keys() == {1, 2} and max(last.values()) < rename["at"]
    assert [event["step"] for event in run.events("loaded")] == [AT - 1] * 4
    check_end(run, unbroken(4))


@pytest.mark.campaign(seconds=70)
def test_a_dump_that_takes_longer_than_torchrun_waits(tmp_path: Path, unbroken: Callable[[int], Run]) -> None:
    run = begin(tmp_path / "run", 2, "kill-slow", "forward", 1, pause=0.3, TTP_NORMAL_ACTION_TIME_LIMIT="90")
    assert run.finish() == 0, run.output
    check_dump(run, 2, AT - 1, 1)
    check_end(run, unbroken(2))
