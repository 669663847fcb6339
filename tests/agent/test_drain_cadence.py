"""Tests how often snapshots are drained unasked, and which of them go to storage at once."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from random import Random
from types import SimpleNamespace

import pytest

import rekindle
from rekindle.agent.backlog import Backlog
from rekindle.agent.drain import Drainer
from rekindle.format.lineage import Incarnation, ShardId
from rekindle.memory.job import JobInfo
from rekindle.memory.job_dir import JobDir, memory_base
from rekindle.memory.notes import Common
from rekindle.memory.slots import Slots
from tests.conftest import commit, make_shard
from tests.faults.harness import wait_for
from tests.stored import steps_on

FIRST = Incarnation(1, "a" * 16)

Save = Callable[..., None]


@pytest.fixture
def job(memory: Path, root: Path) -> Iterator[JobDir]:
    """One that is being trained, and sends a checkpoint to storage every 30 s."""
    job = JobDir.of(root, memory_base())
    job.create()
    job.write_job(JobInfo(str(root), [0], 1, 9, None, 600.0, persist_seconds=30.0))
    lock = job.lock_rank(0, 1.0)
    yield job
    lock.release()


@pytest.fixture
def save(job: JobDir) -> Iterator[Save]:
    with ExitStack() as stack:
        slots = Slots(job, 0, 1, [0])
        stack.callback(slots.close)

        def save(step: int, persist: bool = False) -> None:
            receipt, data = make_shard(ShardId(step, 0, 1, FIRST, persist), {"x": b"x" * 1000})
            commit(slots, receipt, data)

        yield save


def test_the_first_goes_at_once_and_the_next_when_its_time_has_come(job: JobDir, root: Path, save: Save) -> None:
    for step in (1, 2):
        save(step)
        Drainer(job).tick()  # a new one each time: it remembers nothing
    assert steps_on(root) == [1]
    job.notes.write_last_drain(time.monotonic() - 31, 1.0)
    save(3)
    Drainer(job).tick()
    assert steps_on(root) == [1, 3]
    save(4)
    Drainer(job).tick()
    assert steps_on(root) == [1, 3]


def test_of_several_nodes_each_brings_the_step_that_all_have_marked(job: JobDir, root: Path, save: Save) -> None:
    info = JobInfo(str(root), [0], 1, 9, None, 600.0, persist_seconds=30.0, start=FIRST.id, host="127.0.0.1")
    job.write_job(info)
    save(1)
    assert not Drainer(job).tick(), "other nodes may choose another one"
    job.notes.write_common(Common("b" * 16, 1, -1, 1))
    assert not Drainer(job).tick(), "that was an earlier start"
    job.notes.write_common(Common(FIRST.id, 2, -1, 2))
    for step in (2, 3):
        save(step)
    assert Drainer(job).tick() and steps_on(root) == [2]
    job.write_job(replace(info, persist_seconds=None))
    job.notes.write_common(Common(FIRST.id, 3, -1, 3))
    assert not Drainer(job).tick(), "time decides nothing"


def test_what_was_asked_for_goes_at_once_and_once(job: JobDir, root: Path, save: Save) -> None:
    drainer = Drainer(job)
    for step in range(1, 5):
        save(step, persist=step == 3)
        drainer.tick()
    assert steps_on(root) == [1, 3] and not drainer.tick()


def test_storage_is_written_to_for_a_tenth_of_the_time(job: JobDir, root: Path, save: Save) -> None:
    job.notes.write_last_drain(time.monotonic() - 50, 6.0)
    save(1)
    assert not Drainer(job).tick()
    job.notes.write_last_drain(time.monotonic() - 61, 6.0)
    assert Drainer(job).tick() and steps_on(root) == [1]


@pytest.mark.parametrize("note", ["ahead", "longer than it has been", "nonsense", "endless"])
def test_a_clock_that_jumps_costs_one_drain_and_stops_none(job: JobDir, root: Path, save: Save, note: str) -> None:
    now = time.monotonic()
    job.notes.write_last_drain(
        *{"ahead": (now + 1e6, 1.0), "longer than it has been": (now - 5, 1e6)}.get(note, (now, 1.0))
    )
    if note in ("nonsense", "endless"):
        (job.path / "drained").write_text({"nonsense": "?", "endless": f"{now} inf"}[note])
    save(1)
    assert Drainer(job).tick() and steps_on(root) == [1]
    save(2)
    assert not Drainer(job).tick()


def test_when_the_last_trainer_has_gone_storage_gets_all_there_is(memory: Path, root: Path) -> None:
    job = JobDir.of(root, memory_base())
    job.create()
    job.write_job(JobInfo(str(root), [0], 1, 9, None, 600.0, persist_seconds=30.0))
    job.notes.write_last_drain(time.monotonic(), 1.0)
    slots = Slots(job, 0, 1, [0])
    receipt, data = make_shard(ShardId(1, 0, 1, FIRST, persist=False), {"x": b"x" * 1000})
    commit(slots, receipt, data)
    slots.close()
    assert Drainer(job).tick() and steps_on(root) == [1]


def test_a_job_file_of_an_older_version_says_that_steps_decide(job: JobDir, root: Path) -> None:
    said = JobInfo(str(root), [0], 1, None, None, 600.0, persist_seconds=5.5)
    job.write_job(said)
    assert job.read_job() == said
    old = {key: value for key, value in said.to_json().items() if key not in ("persist_seconds", "keep_by_age")}
    assert JobInfo.from_json(old) == JobInfo(str(root), [0], 1, 2, None, 600.0), (
        "and an older agent reads what we write"
    )


def test_training_fast_writes_seldom_and_the_end_loses_nothing(
    root: Path, memory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "rekindle")
    values = rekindle.Values(x=0)
    ckpt = rekindle.Checkpointer(root, {"values": values})
    told = [record.message for record in caplog.records if "if this node is lost" in record.message]
    assert len(told) == 1 and "at most every 30 s" in told[0]
    began = time.monotonic()
    for step in range(1, 200):
        values.x = step
        ckpt.step(step)
        if step == 1:
            wait_for(lambda: steps_on(root) == [1])
    ckpt.save(200, wait="durable", timeout=60)
    for step in range(201, 301):
        ckpt.step(step)
    there = steps_on(root)
    seconds = time.monotonic() - began
    ckpt.close()
    assert {1, 200} <= set(there) and len(there) <= 2 + seconds / 30, there
    assert steps_on(root)[-1] == 300


def test_where_steps_decide_they_are_told(root: Path, memory: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "rekindle")
    ckpt = rekindle.Checkpointer(root, {"values": rekindle.Values(x=0)}, persist_every=70)
    assert caplog.text.count("if this node is lost, up to 70 steps are lost") == 1
    ckpt.close()


@pytest.mark.parametrize("value", [-1, True, "30", float("inf"), float("nan")])
def test_a_pause_that_is_no_time_is_refused(root: Path, memory: Path, value: object) -> None:
    with pytest.raises(rekindle.UsageError, match="persist_seconds"):
        rekindle.Checkpointer(root, {}, persist_seconds=value)  # type: ignore[arg-type]


def test_times_between_drains_are_kept_within_one_step_under_jitter(
    job: JobDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a clock of its own: each step has a snapshot, and the agent looks twenty times a second."""
    draw, now, step_ends, begun = Random(5), 1e6, 1e6, list[float]()
    info = JobInfo(str(job.path), [0], 1, 9, None, 600.0, persist_seconds=30.0)
    backlog = Backlog(job)
    monkeypatch.setattr("rekindle.agent.backlog.time", SimpleNamespace(monotonic=lambda: now))
    drained = True
    while len(begun) < 30:
        while step_ends <= now:
            step_ends, drained = step_ends + draw.uniform(0.5, 1.5) * 2.0, False
        if not drained and backlog._due(info):
            job.notes.write_last_drain(now, 1.0)
            begun, drained = [*begun, now], True
            now += 1.0  # which it took
        now += 0.05
    gaps = [later - at for at, later in pairwise(begun)]
    assert min(gaps) >= 30 - 0.01 and max(gaps) <= 30 + 3 + 0.1, gaps  # the note's time is rounded
