"""Faults around a restart: one of a former start ends nobody, and one before the first step takes nothing away."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import rekindle
from rekindle.faults import guard as guard_module
from rekindle.faults.agent_link import AgentLink
from rekindle.faults.gasp import Gasp
from rekindle.faults.hooks import HookCalls, Hooks
from rekindle.memory.fault import Fault
from rekindle.memory.job_dir import JobDir
from rekindle.storage.catalog import MEMORY

STEP = 5


class Restarted:
    """A job's second start, which has restored a step and made none. It has no agent."""

    def __init__(self, root: Path) -> None:
        first = self._begin(root)
        first.save(STEP, wait="memory")
        first._let_go(None)
        self.ckpt = self._begin(root)
        assert self.ckpt._base is not None and self.ckpt._base.step == STEP
        self.enter()

    def _begin(self, root: Path) -> rekindle.Checkpointer:
        ckpt = rekindle.Checkpointer(root, {"model": torch.nn.Linear(4, 4)}, snapshot_every=10**9)
        ckpt.restore()
        return ckpt

    def enter(self) -> None:
        self.guard = self.ckpt.guard(watchdog=False, notices=())
        self.guard.__enter__()

    def leave(self) -> None:
        self.guard._gate.release()
        self.guard._undo.close()

    @property
    def job(self) -> JobDir:
        return self.ckpt._session.job_dir

    def fault(self, cause: str, generation: int) -> Fault:
        return Fault(cause, 0, generation, STEP, "rank 0 raised ValueError")


@pytest.fixture
def restarted(root: Path, memory: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Restarted]:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    made = Restarted(root)
    yield made
    made.leave()
    made.ckpt._let_go(None)


def test_a_fault_of_a_former_start_that_is_told_late_is_passed_over(restarted: Restarted) -> None:
    """An agent that was stopped learns of it when the next start has begun."""
    guard = restarted.guard
    for generation, counts in ((guard._generation - 1, False), (guard._generation, True)):
        guard._hear({"fault": restarted.fault("exception", generation).to_json()})
        assert guard._heard.is_set() is counts and (guard._first is not None) is counts


def test_the_agent_is_told_of_a_rank_that_is_ready_to_secure_its_state(
    restarted: Restarted, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may answer with a fault at once."""
    ready = []

    class Watched(AgentLink):
        def __init__(self, job: JobDir, hello: dict[str, Any], hear: Callable[[dict[str, Any]], None]) -> None:
            rank: Any = hear
            ready.append(all(hasattr(rank.__self__, name) for name in ("_gate", "_rescue", "_devices")))
            super().__init__(job, hello, hear)

    restarted.leave()
    monkeypatch.setattr(guard_module, "AgentLink", Watched)
    restarted.enter()
    assert ready == [True]


@pytest.mark.parametrize(
    ("cause", "former"),
    [("exception", True), ("signal", True), ("notice", False)],  # on storage a step of this start is of more use
)
def test_what_was_restored_stays_in_memory_at_a_fault_before_the_first_step(
    restarted: Restarted, cause: str, *, former: bool
) -> None:
    guard = restarted.guard
    fault = restarted.fault(cause, guard._generation)
    hooks = HookCalls(Hooks(), fault, fault.noticed + 60.0, [])
    gasping = Gasp(guard._gate, guard._securer, guard._peers, 0, True, time.monotonic() + 60.0, hooks)
    gasping._secure_newest(time.monotonic() + 60.0, cause)
    found = {stamp.incarnation.generation for stamp, _ in restarted.job.snapshots.shard_ids()}
    assert gasping.secured == {STEP: MEMORY} and found == {guard._generation - former}


def test_what_was_restored_is_not_counted_on_where_memory_has_lost_it(restarted: Restarted) -> None:
    securer = restarted.guard._securer
    assert securer.holds_restored(STEP) and not securer.holds_restored(STEP + 1)
    restarted.job.snapshots.remove_shards(0)
    assert not securer.holds_restored(STEP)
