"""Checks the state of a root for its writers and for restores: mounted, deleted, or used by another start."""

from __future__ import annotations

import errno
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace

from rekindle.format.lineage import Incarnation, ShardId, drop_superseded
from rekindle.format.names import Root
from rekindle.memory.nodes import Nodes
from rekindle.memory.notes import RootIdentity
from rekindle.storage.store import Store

__all__ = [
    "checkpoints_deleted",
    "describe_missing_shards",
    "describe_recreated_root",
    "describe_rival",
    "is_superseded",
    "newest_live",
    "root_identity",
]

_SOME = 8
"""Ranks that a message names at most."""


def newest_live(
    store: Store, noted: int | None, starts: Iterable[Incarnation] = (), identity: RootIdentity | None = None
) -> ShardId | None:
    """Returns the newest checkpoint that no start of the job has superseded. ``starts`` adds those that memory knows.

    Raises FileNotFoundError where step ``noted`` was and nothing is now, unless ``identity`` tells that the root was
    deleted. A mount point without its mount is as empty, and what is written there is hidden by the next mount.
    """
    published = store.published() or store.published()  # the only one may just be getting its name
    if not published and noted is not None and not store.damaged() and not store.was_deleted(identity):
        raise FileNotFoundError(errno.ENOENT, f"step {noted} was there, and nothing is now", str(store.root))
    return next(reversed(drop_superseded([entry.stamp for entry in published], starts)), None)


def checkpoints_deleted(store: Store, noted: int | None, identity: RootIdentity | None) -> bool:
    """True if ``noted`` and all else that was on storage was deleted, with the root or without, as seen from here."""
    return noted is not None and not store.published() and not store.damaged() and store.was_deleted(identity)


def root_identity(store: Store, step: int) -> RootIdentity | None:
    """Returns ``Store.trace``; None where that can't be told at the moment.

    To be asked before ``step`` is published, so that it is known whatever becomes of the root after that.
    """
    with suppress(OSError):
        return store.trace(step)
    return None


def is_superseded(store: Store, stamp: ShardId) -> bool:
    """True if another checkpoint as new is durable, so that others may have removed the unfinished one of ``stamp``."""
    stands = drop_superseded([entry.stamp for entry in store.published()])
    return any(other.checkpoint != stamp.checkpoint and other.step >= stamp.step for other in stands)


def describe_recreated_root(root: Root, step: int) -> str:
    """Returns the message of a running job whose root was deleted, and is made again with ``step``."""
    return f"{root} was deleted while the job runs: it is made anew, and step {step} is its oldest checkpoint now"


def describe_rival(root: Root, newest: ShardId, consequence: str) -> str:
    """Returns the message of two starts that write to one root.

    ``consequence`` says what becomes of this start's checkpoints.
    """
    return (
        f"{root}: another start of this job, generation {newest.incarnation.generation}, writes there; {consequence}: "
        "end one of the two, and give each job a root of its own"
    )


def describe_missing_shards(store: Store, stamp: ShardId, nodes: Nodes | None = None) -> str | None:
    """Returns the message of a step whose shards are not all on storage, though this node's are; None if all are.

    ``nodes`` are those of the job, if they are known, by which it says whose they are. Costs a look-up for each rank of
    the job.
    """
    missing = [rank for rank in range(stamp.world) if not store.has_shard(replace(stamp, rank=rank))]
    if not missing:
        return None
    some = ", ".join(map(str, missing[:_SOME])) + (", ..." if len(missing) > _SOME else "")
    names: list[str] = []
    if nodes is not None and nodes.start == stamp.incarnation.id:
        names = sorted({nodes.node_of(rank).name for rank in missing})[:_SOME]
    whose = f" ({', '.join(names)})" if names else ""
    return (
        f"step {stamp.step} is not whole on storage: {store.root} lacks the shard of rank(s) {some}, and another node"
        f"{whose} has to write it: run 'rekindle status' there, and see that it has the same root mounted"
    )
