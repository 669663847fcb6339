"""Snapshots of ranks that have departed from this node."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from rekindle.common.process_start import clock_id
from rekindle.format.lineage import CheckpointKey, Incarnation, ShardId
from rekindle.memory.clean_up import remove_departed_ranks
from rekindle.memory.incidents import StartRecord, write_start
from rekindle.memory.job import JobInfo
from rekindle.memory.job_dir import JobDir
from rekindle.memory.lock import Lock
from rekindle.memory.slots import Slots
from rekindle.testing import make_shard
from tests.conftest import commit


def test_what_is_on_storage_stays_in_memory_until_ranks_on_other_nodes_have_restored(memory: Path) -> None:
    job = JobDir(memory / "rekindle" / "job")
    job.create()
    stamp = ShardId(7, 1, 2, Incarnation(1, "a" * 16))
    slots = Slots(job, 1, 2, [1])
    commit(slots, *make_shard(stamp, {"x": b"x"}))
    slots.close()
    lock = job.lock_rank(0, 0.0)
    job.write_job(JobInfo("/root", [0], 2, 2, None, 600.0, start="b" * 16, host="127.0.0.1"))
    record = StartRecord("b" * 16, 2, clock_id(), formed=1.0, started=None)
    write_start(job, record)
    remove_departed_ranks(job, stamp.checkpoint)
    assert [found for found, _ in job.snapshots.shard_ids()] == [stamp]
    write_start(job, replace(record, restored=2.0))
    remove_departed_ranks(job, stamp.checkpoint)
    assert not list(job.snapshots.shard_ids())
    lock.release()


def test_copies_that_nobody_writes_any_more_go_once_storage_has_the_step(memory: Path) -> None:
    """As after a start on one node: they take as much memory as a state of its own."""
    job = JobDir(memory / "rekindle" / "job")
    job.create()
    for directory in (job.copies.path, job.copies.paths.slots):
        directory.mkdir(0o700)
    stamps = [ShardId(step, 1, 2, Incarnation(1, "a" * 16)) for step in (5, 7)]
    slots = Slots(job.copies, 1, 2, [1])
    slots.reserve(5000, 3)
    for stamp in stamps:
        commit(slots, *make_shard(stamp, {"x": b"x"}))
    slots.close()
    lock = job.lock_rank(0, 0.0)
    job.write_job(JobInfo("/root", [0], 1, 1, None, 600.0, start="b" * 16))
    copier = Lock(job.copies.paths.agent_lock)
    assert copier.acquire()
    remove_departed_ranks(job, stamps[1].checkpoint)
    assert {found for found, _ in job.copies.snapshots.shard_ids()} == set(stamps), "the copier uses these files"
    copier.release()
    remove_departed_ranks(job, stamps[0].checkpoint)
    assert [found for found, _ in job.copies.snapshots.shard_ids()] == stamps[1:], "storage lacks it"
    remove_departed_ranks(job, CheckpointKey(8, Incarnation(2, "b" * 16, "a" * 16, 7)))
    assert not job.copies.snapshots.ranks()
    lock.release()
