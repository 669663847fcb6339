"""An agent does no round of work while there is nothing to do, and does one at once when there is."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from rekindle.agent import quiet
from rekindle.agent.service import Agent
from rekindle.format.lineage import ShardId
from rekindle.memory.fault import Fault
from rekindle.memory.job import JobInfo
from rekindle.memory.job_dir import JobDir, memory_base
from rekindle.memory.lock import Lock
from tests.conftest import commit, make_shard
from tests.faults.harness import wait_for
from tests.memory.saved import FIRST, alone
from tests.stored import steps_on


class Job:
    """A job whose rank trains in this process, and its agent, which does as many rounds as it is told to."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.job = JobDir.of(root, memory_base())
        self.job.create()
        self.info = JobInfo(str(root), [0], 1, 9, None, 600.0, persist_seconds=30.0, start=FIRST.id)
        self.job.write_job(self.info)
        self.trainer = self.job.lock_rank(0, 5.0)
        self.slots = alone(self.job)
        self.agent = Agent(self.job, Lock(self.job.paths.agent_lock))
        self.save(1)
        while self.agent._work():
            pass
        assert steps_on(root) == [1] and self.rests

    def save(self, step: int, *, persist: bool = False) -> None:
        receipt, data = make_shard(ShardId(step, 0, 1, FIRST, persist), {"x": b"x" * 1000})
        commit(self.slots, receipt, data)

    @property
    def rests(self) -> bool:
        return self.agent._rests()


@pytest.fixture
def job(root: Path, memory: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Job]:
    monkeypatch.setattr(quiet, "_LONGEST", 1000.0)
    with ExitStack() as stack:
        job = Job(root)
        stack.callback(job.slots.close)
        stack.callback(job.trainer.release)
        yield job


def test_snapshots_that_nobody_asks_for_are_left_alone_until_one_is_due(job: Job) -> None:
    for step in range(2, 6):
        job.save(step)
        assert job.rests
    job.job.notes.write_last_drain(time.monotonic() - 26, 0.1)
    job.agent._work()
    assert job.rests
    wait_for(lambda: not job.rests, what="the newest one to be due")
    assert job.agent._work() and steps_on(job.root)[-1] == 5


def test_once_one_is_due_the_next_snapshot_is_seen(job: Job) -> None:
    job.job.notes.write_last_drain(time.monotonic() - 60, 0.1)
    job.agent._work()
    assert job.rests, "storage has the newest one"
    job.save(2)
    assert not job.rests


@pytest.mark.parametrize(
    "event",
    [
        pytest.param(lambda job: job.save(2, persist=True), id="a rank asks"),
        pytest.param(lambda job: setattr(job.agent.monitor, "fault", Fault("kill", 0, 1, 3, "")), id="a fault"),
        pytest.param(lambda job: job.job.write_job(replace(job.info, persist_seconds=1.0)), id="a start"),
    ],
)
def test_what_happens_is_noticed(job: Job, event: Callable[[Job], object]) -> None:
    event(job)
    assert not job.rests


def test_it_looks_all_the_same_after_a_while(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quiet, "_LONGEST", 0.05)
    job.agent._work()
    wait_for(lambda: not job.rests)


def wait_for_another_node(job: Job) -> None:
    unfinished, stamp = job.agent.drainer._unfinished, ShardId(1, 0, 2, FIRST)
    unfinished._waiting[stamp.checkpoint], unfinished._ask_at = (stamp, time.monotonic()), math.inf


@pytest.mark.parametrize(
    "event",
    [
        pytest.param(lambda job: job.job.write_job(replace(job.info, host="127.0.0.1")), id="several nodes"),
        pytest.param(lambda job: setattr(job.agent.drainer._thirds, "_since", time.monotonic()), id="a third slot"),
        pytest.param(wait_for_another_node, id="another node's shards"),
        pytest.param(lambda job: job.agent.drainer.hurry(), id="a hurry"),
    ],
)
def test_there_is_no_rest_while_each_moment_counts(job: Job, event: Callable[[Job], object]) -> None:
    event(job)
    job.agent._work()
    assert not job.rests
