"""Ends a trainer's part: waits until storage has the newest checkpoint, and until the agent has left."""

from __future__ import annotations

import os
import time
from collections.abc import Collection
from concurrent.futures import wait
from contextlib import suppress
from dataclasses import replace
from functools import partial

from rekindle.agent.drain import Drainer
from rekindle.common.os_errors import describe_error
from rekindle.common.timeouts import in_background
from rekindle.errors import NotDurableError
from rekindle.format.lineage import ShardId
from rekindle.memory.job_dir import JobDir
from rekindle.memory.lock import Lock
from rekindle.session.agent_keeper import AgentKeeper
from rekindle.storage.checks import describe_missing_shards
from rekindle.storage.store import Store

__all__ = ["carry_rest", "wait_durable", "wait_for_agent"]

_LOOK = 1.0
"""Seconds that a look at storage gets, though the time is over."""
_LEAVE, _OTHERS = 30.0, 2.0
"""Seconds for an agent to leave, which takes it 0.1 s after its last drain; and where it may have reason to stay."""
_REST = 10.0
"""Seconds that storage gets for what goes there last: records of some 800 bytes, and entries of compile caches."""
_POLL = 0.005


def wait_durable(
    stamp: ShardId,
    store: Store,
    job: JobDir | None,
    keeper: AgentKeeper | None,
    seconds: float,
    local_ranks: Collection[int] = (),
    *,
    once: bool = False,
) -> None:
    """Returns when a checkpoint is on storage. Raises NotDurableError after ``seconds``.

    It is raised at once when one of ``local_ranks``, which each save a part, won't bring its own any more. ``once``: it
    is enough that it has been there, should somebody have deleted it since.
    """
    deadline = time.monotonic() + seconds
    while True:
        noted = job.notes.durable() if once and job is not None else None
        if noted is not None and noted >= stamp.step:
            return
        why = "storage is slow, or hangs, or drain_limit is low"
        lost: list[int] | None = []
        try:  # storage that hangs must not keep us for longer
            looked = in_background(partial(_lost, stamp, store, job, local_ranks), "rekindle-look")
            if wait([looked], max(_LOOK, deadline - time.monotonic())).done:
                lost = looked.result()
        except (OSError, RuntimeError) as error:  # it may be back in a moment; or no thread is to be had for now
            why = describe_error(error)
        if lost is None:
            if keeper is not None:
                keeper.pass_on_report()  # nobody may look again
            return
        if lost:
            raise NotDurableError(_describe_lost(stamp, job, lost[0]))
        if keeper is not None:
            keeper.check()
        if time.monotonic() > deadline:
            told = job.notes.drain_error() if job is not None else ""
            why = told or _describe_missing(stamp, store) or why
            raise NotDurableError(f"step {stamp.step} is not on storage after {seconds:.0f} s: {why}")
        time.sleep(store.poll)


def _describe_missing(stamp: ShardId, store: Store) -> str | None:
    """Returns the message about missing shards, if this rank's is there, and storage answers soon."""
    with suppress(OSError, RuntimeError):
        looked = in_background(
            lambda: describe_missing_shards(store, stamp) if store.has_shard(stamp) else None, "rekindle-look"
        )
        if wait([looked], _LOOK).done:
            return looked.result()
    return None


def _lost(stamp: ShardId, store: Store, job: JobDir | None, local_ranks: Collection[int]) -> list[int] | None:
    """Returns the ranks whose parts can't get to storage any more; None when the checkpoint is there."""
    noted = job.notes.durable() if job is not None else None
    was_there = noted is not None and noted >= stamp.step  # and may be back soon
    if job is None or not local_ranks or was_there:
        return None if store.durable(stamp) else []
    # In this order: a rank that has ended or gone on does nothing more for it, and parts go from memory to storage.
    over = {rank for rank in local_ranks if rank == stamp.rank or _ended(job, rank)}
    stamps = [s for s, _ in job.snapshots.shard_ids() if s.incarnation == stamp.incarnation]
    over |= {s.rank for s in stamps if s.step > stamp.step}
    over -= {s.rank for s in stamps if s.step == stamp.step and (s.persist or s.rank != stamp.rank)}
    lost = [rank for rank in sorted(over) if not store.has_shard(replace(stamp, rank=rank))]
    return None if store.durable(stamp) else lost


def _describe_lost(stamp: ShardId, job: JobDir | None, rank: int) -> str:
    found = job.snapshots.shard_ids() if job is not None else ()
    if any((s.checkpoint, s.rank) == (stamp.checkpoint, rank) for s, _ in found):
        why = f"the part of rank {rank} is in memory, but not marked for storage"
    else:
        why = f"nobody carries it there: rank {rank} has no part of it any more"
    return f"step {stamp.step} is not on storage, and {why}, see its log for why"


def _ended(job: JobDir, rank: int) -> bool:
    lock = job.paths.rank_lock(rank)
    return lock.exists() and Lock.holder(lock) is None  # without its file, as in memory that was removed, nobody knows


def wait_for_agent(job: JobDir) -> None:
    """Waits a while for the agent, which prunes, and removes the job's directory once the last rank has left.

    Nobody then works at storage any more, whoever looks at it next or removes it.
    """
    began = time.monotonic()
    while job.path.exists() and job.agent() not in (None, os.getpid()):
        # For other ranks, or for what one of them has not seen saved.
        stays = job.trainers() or any(job.snapshots.shard_ids())
        if time.monotonic() - began > (_OTHERS if stays else _LEAVE):
            return
        time.sleep(_POLL)


def carry_rest(job: JobDir) -> None:
    """Carries to storage what the agent does last: records of incidents, compile caches. For a job that has no agent.

    Takes a bounded time, and raises nothing.
    """
    with suppress(RuntimeError):  # no thread is to be had
        rest = in_background(lambda: Drainer(job).finish(time.monotonic() + _REST), "rekindle-rest")
        wait([rest], _REST)
