"""What stands on storage, as whoever writes there must see it: it is mounted, and nobody else writes there."""

from __future__ import annotations

import errno
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace

from rekindle.format.lineage import Incarnation, ShardId, continued_by_another, drop_superseded
from rekindle.format.names import Root
from rekindle.memory.notes import RootIdentity
from rekindle.storage.store import Store

__all__ = [
    "DELETED",
    "all_deleted",
    "begins_anew",
    "check_written",
    "lacks",
    "made_anew",
    "newest_on",
    "overtaken",
    "refuse_elsewhere",
    "rival",
    "trace_of",
    "was_deleted",
]

_SOME = 8
"""Ranks that a message names at most."""
DELETED = "deleted"
"""What a rank says that sees that all on storage was deleted."""


def newest_on(
    store: Store, noted: int | None, starts: Iterable[Incarnation] = (), trace: RootIdentity | None = None
) -> ShardId | None:
    """The newest checkpoint that no start of the job has left behind; ``starts`` are known from elsewhere.

    Raises FileNotFoundError where step ``noted`` was and nothing is now, unless ``trace`` tells that the root was
    deleted: so looks what lies below a mount point, and what is written there is lost by the next mount. To be asked
    before the first byte is written, and again before it is said to be durable: a mount may go in between.
    """
    published = store.published() or store.published()  # the only one may just be getting its name
    if not published and noted is not None and not store.damaged() and not store.was_deleted(trace):
        raise FileNotFoundError(errno.ENOENT, f"step {noted} was there, and nothing is now", str(store.root))
    return next(reversed(drop_superseded([entry.stamp for entry in published], starts)), None)


def was_deleted(store: Store, noted: int | None, trace: RootIdentity | None) -> bool:
    """Whether ``noted`` and all else that was on storage was deleted, with the root or without, as seen from here."""
    return noted is not None and not store.published() and not store.damaged() and store.was_deleted(trace)


def all_deleted(views: Collection[str]) -> bool:
    """Whether everything on storage was deleted, by what each rank says: ``DELETED``, "" where it knows of nothing, or
    else. None must see it in use, or miss it."""
    return DELETED in views and not set(views) - {DELETED, ""}


def begins_anew(root: Root) -> str:
    """What to tell of a job that starts where that is so."""
    return (
        f"checkpoints of an earlier run were deleted from {root}: starting anew from step 0; what memory still has of "
        "that run is given up"
    )


def made_anew(root: Root, step: int) -> str:
    """What to tell of a running job whose root was deleted."""
    return f"{root} was deleted while the job runs: it is made anew, with step {step} as its oldest checkpoint"


def trace_of(store: Store, step: int) -> RootIdentity | None:
    """``Store.trace``; None where that can't be told at the moment.

    To be asked before ``step`` is published, so that it is known whatever becomes of the root once it is.
    """
    with suppress(OSError):
        return store.trace(step)
    return None


def rival(root: Root, newest: ShardId, ours: str) -> str:
    """What to tell of another start that writes to ``root``; ``ours`` says what becomes of this one's checkpoints."""
    return (
        f"{root}: another start of this job, generation {newest.incarnation.generation}, writes there; {ours}: "
        "end one of the two, and give each job a root of its own"
    )


def check_written(store: Store, parts: Sequence[ShardId]) -> bool:
    """Whether parts of a step that have been written are there, or it is durable; False where it was overtaken.

    Raises FileNotFoundError where they are gone.
    """
    if all(store.has_shard(stamp) for stamp in parts) or store.durable(parts[0]):
        return True
    if overtaken(store, parts[0]):
        return False
    raise FileNotFoundError(errno.ENOENT, f"what was written of step {parts[0].step} is gone", str(store.root))


def overtaken(store: Store, stamp: ShardId) -> bool:
    """Whether a step as new is durable, so that whoever noticed has removed what was written of this one."""
    stands = drop_superseded([entry.stamp for entry in store.published()])
    return any(other.checkpoint != stamp.checkpoint and other.step >= stamp.step for other in stands)


def lacks(store: Store, stamp: ShardId) -> str | None:
    """What to tell of a step that isn't durable though this node has written its part; None where all parts are there.

    Costs a look-up for each rank of the job.
    """
    missing = [rank for rank in range(stamp.world) if not store.has_shard(replace(stamp, rank=rank))]
    if not missing:
        return None
    some = ", ".join(map(str, missing[:_SOME])) + (", ..." if len(missing) > _SOME else "")
    return (
        f"step {stamp.step} is not on storage as a whole: the part of rank(s) {some} is missing at {store.root}, which "
        "another node has to bring: see 'rekindle status' there, and that it has the same root mounted"
    )


def refuse_elsewhere(
    store: Store, stamp: ShardId, noted: int | None, trace: RootIdentity | None = None
) -> ShardId | None:
    """What is newest there. Raises FileExistsError where another start writes: it would soon prune ``stamp``, unheard.

    Raises FileNotFoundError as ``newest_on`` does.
    """
    newest = newest_on(store, noted, (), trace)
    if newest is not None and continued_by_another(stamp.incarnation, newest.incarnation):
        raise FileExistsError(rival(store.root, newest, "what this one saves is kept nowhere"))
    return newest
