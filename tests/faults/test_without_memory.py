"""Guarded training where memory has no room, or there is none: what is secured goes straight to storage."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import rekindle
from tests.faults.cluster import HELD, Cell, run
from tests.faults.matrix import judge
from tests.faults.test_guard import Play, Trainer, play
from tests.stored import steps_on

__all__ = ["play"]

NO_STORE: dict[str, Any] = {"memory": "/proc/nowhere"}
NO_ROOM: dict[str, Any] = {"memory_limit": 1}


@pytest.mark.parametrize(
    ("fault", "options"),
    [
        pytest.param("exception", NO_STORE, id="exception-no-store"),
        pytest.param(HELD, NO_ROOM, id="term-all-no-room"),
        pytest.param("exception", NO_ROOM, id="exception-no-room", marks=pytest.mark.campaign(seconds=6)),
        pytest.param(HELD, NO_STORE, id="term-all-no-store", marks=pytest.mark.campaign(seconds=6)),
    ],
)
def test_straight_to_storage(
    fault: str, options: dict[str, Any], root: Path, memory: Path, unbroken_cell: Callable[[Path, str, int], list[str]]
) -> None:
    cell = Cell(root, memory, "bare", fault, "backward", options=options)
    out = run(cell)
    assert any(code != 0 for code in out.codes[0]) and len(out.codes) == 2
    assert judge(out, unbroken_cell(memory, "bare", 2)) == []
    assert "restored step 8 from storage" in cell.log(0).read_text()


def test_a_memory_store_that_vanishes_just_before_the_fault(
    root: Path, memory: Path, unbroken_cell: Callable[[Path, str, int], list[str]]
) -> None:
    cell = Cell(root, memory, "bare", "exception", "backward", memory_goes=True)
    out = run(cell)
    assert "step 8 goes straight to storage" in cell.log(0).read_text()
    assert judge(out, unbroken_cell(memory, "bare", 2)) == []
    assert "restored step 8 from storage" in cell.log(0).read_text()


def test_the_survivor_of_a_kill_tells_that_its_step_is_not_complete(root: Path, memory: Path) -> None:
    """Nothing outlives a rank that is killed, so nobody has its part: what the other one secures can't be restored."""
    cell = Cell(root, memory, "bare", "kill", "backward", options=NO_STORE)
    out = run(cell)
    log = cell.log(0).read_text()
    assert "rank 0's part of step 8 secured on storage, " in log and "the step is not complete there" in log
    assert out.resumed == 0 and "secured in memory" not in log


def _raises_with_a_save_before(trainer: Trainer) -> None:
    ckpt = trainer.begin(**NO_STORE)
    if trainer.attempt == 0:
        with ckpt.guard():
            trainer.train(ckpt, 3)
            ckpt.save(3, wait="durable")
            trainer.train(ckpt, 2)
            raise RuntimeError("a fault")


def test_one_rank_tells_that_storage_has_its_step(play: Play) -> None:
    codes, notes, log = play(_raises_with_a_save_before, 2)
    assert codes == [1, 0] and notes[-1][:2] == ["restored", 5], log
    assert "step 5 secured on storage, 0." in log or "step 5 secured on storage, 1." in log, log


def _torn_with_a_save_before(trainer: Trainer) -> None:
    ckpt = trainer.begin(**NO_STORE)
    with ckpt.guard():
        trainer.train(ckpt, 3)
        for step in (3, 4):
            ckpt.save(step, wait="durable")
        trainer.model(trainer.model.weight).sum().backward()
        trainer.optimizer.step()
        raise RuntimeError("a fault")


def test_what_storage_has_is_not_said_to_be_in_memory(play: Play) -> None:
    codes, _, log = play(_torn_with_a_save_before)
    assert codes == [1] and "the next start goes on from the newest checkpoint on storage" in log, log
    assert "in memory" not in log, log


@pytest.mark.parametrize("options", [{"snapshot_every": 2}, {"snapshot_every": 10**9}, {"persist_every": 100}])
def test_the_last_step_of_a_guarded_part_is_saved(options: dict[str, Any], root: Path, memory: Path) -> None:
    values = rekindle.Values(x=0)
    ckpt = rekindle.Checkpointer(root, {"values": values}, **NO_STORE, **options)
    assert ckpt.restore() == 0
    with ckpt.guard(watchdog=False):
        for step in range(1, 6):
            values.x = step
            ckpt.step(step)
    ckpt.close(timeout=60)
    assert steps_on(root)[-1] == 5
    values.x = 0
    with rekindle.Checkpointer(root, {"values": values}, **NO_STORE) as ckpt:
        assert ckpt.restore() == values.x == 5
