"""Checkpoints made by hand, on storage and in memory, for tests that need no trainer; and what storage has."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from rekindle.format.lineage import Incarnation, ShardId
from rekindle.format.names import step_dir
from rekindle.memory.job import JobInfo
from rekindle.memory.job_dir import JobDir, memory_base
from rekindle.memory.slots import Slots
from rekindle.storage.catalog import find_copies
from rekindle.storage.posix import PosixStore
from rekindle.storage.verify import verify
from rekindle.testing import make_shard
from tests.conftest import commit

START = Incarnation(1, "11" * 8)


def save(root: Path, step: int, published: bool = True, nbytes: int = 8) -> Path:
    """A checkpoint of one rank on storage. Gives its directory."""
    stamp = ShardId(step, 0, 1, START)
    receipt, shard = make_shard(stamp, {"a": bytes(nbytes)})
    store = PosixStore(root)
    store.write_shard(receipt, memoryview(shard), lambda _: None)
    if published:
        assert store.publish(stamp)
    return root / step_dir(step)


def job_in(memory: Path, root: Path, world: int = 1, drain_limit: int | None = None) -> JobDir:
    """A job that has memory on this node, as its trainers left it when they died."""
    job = JobDir.of(root, memory_base(memory))
    job.create()
    job.write_job(JobInfo(str(root), list(range(world)), world, 2, None, 900.0, drain_limit))
    return job


def remember(job: JobDir, step: int, rank: int = 0, world: int = 1, nbytes: int = 8) -> Path:
    """One rank's snapshot in memory. Gives its receipt."""
    stamp = ShardId(step, rank, world, START, True)
    receipt, shard = make_shard(stamp, {"a": bytes(nbytes)})
    commit(Slots(job, rank, world, list(range(world))), receipt, shard)
    return next(path for found, path in job.snapshots.shard_ids() if (found.step, found.rank) == (step, rank))


def steps_on(root: Path) -> list[int]:
    """Steps on storage, oldest first."""
    return [entry.stamp.step for entry in PosixStore(root).published()]


def newest(root: Path) -> int:
    """The newest step on storage; -1 for none."""
    return max(steps_on(root), default=-1)


def sound(root: Path) -> list[int]:
    """Steps on storage, newest first, each read and verified. It begins anew when an agent publishes one meanwhile."""
    for _ in range(20):
        copies = find_copies(None, PosixStore(root))
        with suppress(FileNotFoundError):
            defects = [defect for copy in copies for defect in verify(copy)]
            assert not defects, defects
            return [copy.step for copy in copies]
    raise AssertionError("copies come and go all the time")
