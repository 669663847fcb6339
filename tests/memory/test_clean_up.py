"""Snapshots of ranks that have departed from this node."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from rekindle.common.process_start import clock_id
from rekindle.format.lineage import Incarnation, ShardId
from rekindle.memory.clean_up import remove_departed_ranks
from rekindle.memory.incidents import StartRecord, write_start
from rekindle.memory.job import JobInfo
from rekindle.memory.job_dir import JobDir
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
