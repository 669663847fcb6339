"""Removes snapshots that a checkpoint on storage makes superfluous."""

from __future__ import annotations

from contextlib import suppress

from rekindle.errors import BusyError, FormatError
from rekindle.format.lineage import CheckpointKey, ShardId
from rekindle.memory.incidents import read_start
from rekindle.memory.job_dir import JobDir
from rekindle.memory.lock import Lock
from rekindle.memory.paths import RANK_SLOTS, matching, rank_of

__all__ = ["remove_departed_ranks", "remove_superfluous"]


def remove_superfluous(job: JobDir, rank: int, durable: CheckpointKey) -> bool:
    """Removes a rank's snapshots, and those of departed ranks, if the checkpoint ``durable`` makes them superfluous.

    Returns False, and removes nothing, if it doesn't: a rank that went back to an older step may have left a newer
    snapshot that only memory holds.
    """
    if not all(_superfluous(stamp, durable) for stamp, _ in job.snapshots.shard_ids() if stamp.rank == rank):
        return False
    with suppress(BusyError, FormatError, FileNotFoundError):  # somebody may have removed all of it
        remove_departed_ranks(job, durable)
    job.snapshots.remove(rank)
    return True


def remove_departed_ranks(job: JobDir, durable: CheckpointKey) -> None:
    """Removes the files of ranks that this node no longer has: the job came back with fewer of them.

    A snapshot that ``durable`` doesn't make superfluous stays until the present ranks have a durable checkpoint of
    their own: it may be the newest there is, and not drained yet. All stay while ranks of several nodes restore: those
    that have departed to another one read theirs from here. Copies of another node's snapshots go alike once nobody
    writes them any more. Raises BusyError, FormatError or OSError.
    """
    with job.locked():  # no rank arrives meanwhile
        info, trainers = job.read_job(), job.trainers()
        if info is None or not trainers or (info.host and _restores(job, info.start)):
            return
        stamps = list(job.snapshots.shard_ids())
        found = {rank_of(path) for path in matching(job.paths.slots, RANK_SLOTS)}
        found |= {stamp.rank for stamp, _ in stamps}
        needed = {path for stamp, path in stamps if not _superfluous(stamp, durable)}
        for rank in found.difference(info.ranks, trainers):
            job.snapshots.remove(rank, {path for stamp, path in stamps if stamp.rank == rank} & needed)
        _remove_copies(job.copies, durable)


def _remove_copies(copies: JobDir, durable: CheckpointKey) -> None:
    """Removes what ``durable`` makes superfluous, unless a copier is there, which tidies up itself."""
    ranks = copies.snapshots.ranks()
    copier = Lock(copies.paths.agent_lock)
    if not ranks or not copier.acquire():
        return
    try:
        needed = {path for stamp, path in copies.snapshots.shard_ids() if not _superfluous(stamp, durable)}
        for rank in ranks:
            copies.snapshots.remove_shards(rank, needed)
    finally:
        copier.release()


def _restores(job: JobDir, start: str) -> bool:
    record = read_start(job)
    return record is not None and record.start == start and record.restored is None


def _superfluous(stamp: ShardId, durable: CheckpointKey) -> bool:
    """True if the durable checkpoint is at least as new as the snapshot, in the job's lineage.

    A snapshot of an older start is no newer than the step that the later start continued from, or was superseded by it.
    """
    step, incarnation = durable
    older = stamp.incarnation.generation < incarnation.generation
    return older or (stamp.incarnation == incarnation and stamp.step <= step)
