"""Finds every copy of every checkpoint that this node can see, in memory and on storage, for the job itself."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from rekindle.format.files import Directory, Files
from rekindle.format.lineage import CheckpointKey, Incarnation, ShardId, drop_superseded
from rekindle.format.metric import Metric
from rekindle.memory.job_dir import JobDir
from rekindle.storage.store import Contents, Store

__all__ = [
    "MEMORY",
    "PEER",
    "STORAGE",
    "Checkpoint",
    "StoredCopy",
    "copies_from",
    "list_checkpoints",
    "find_copies",
]

MEMORY = "memory"
PEER = "peer"
STORAGE = "storage"


@dataclass(frozen=True)
class StoredCopy:
    """One copy of a checkpoint, or a node's part of one, in its memory or on storage."""

    step: int
    incarnation: Incarnation
    world: int
    place: str
    """``memory``, that of this node; ``peer``, that of another one; or ``storage``."""
    files: Files
    ranks: frozenset[int]
    """Ranks whose shards are there. On storage these are all ranks."""
    persist: bool
    pinned: bool = False
    """True if retention must not remove it on storage, now or once it is there."""
    metric: Metric | None = None

    @property
    def checkpoint(self) -> CheckpointKey:
        return CheckpointKey(self.step, self.incarnation)

    @property
    def stamp(self) -> ShardId:
        return ShardId(self.step, 0, self.world, self.incarnation, self.persist, pinned=self.pinned, metric=self.metric)


def find_copies(job: JobDir | None, store: Store | None, *, own: bool = False) -> list[StoredCopy]:
    """Finds all copies in this node's memory and on storage, newest first, memory before storage.

    What memory keeps of another node's snapshots is one more copy, after that of its own ranks' snapshots. With ``own``
    it is left out. Raises OSError when storage can't be listed.
    """
    return copies_from(job, None if store is None else store.contents(), own=own)


def copies_from(job: JobDir | None, stored: Contents | None, *, own: bool = False) -> list[StoredCopy]:
    """Returns what ``find_copies`` does, with storage as it was ``stored`` when it was listed."""
    found = [] if job is None else _in_memory(job.snapshots.shard_ids())
    if job is not None and not own:
        found += _in_memory(job.copies.snapshots.shard_ids())
    for entry in stored.published if stored is not None else ():
        stamp, everyone = entry.stamp, frozenset(range(entry.stamp.world))
        whole = StoredCopy(stamp.step, stamp.incarnation, stamp.world, STORAGE, entry.files, everyone, True)
        found.append(replace(whole, pinned=entry.pinned, metric=stamp.metric))
    return sorted(found, key=lambda c: (*c.checkpoint, c.place == MEMORY), reverse=True)


def _in_memory(stamps: Iterable[tuple[ShardId, Path]]) -> list[StoredCopy]:
    found: dict[CheckpointKey, list[tuple[ShardId, Path]]] = {}
    for stamp, path in stamps:
        found.setdefault(stamp.checkpoint, []).append((stamp, path))
    copies = []
    for (step, incarnation), parts in found.items():
        first = parts[0][0]
        parts = [part for part in parts if (part[0].world, part[0].save) == (first.world, first.save)]
        ranks = frozenset(stamp.rank for stamp, _ in parts)
        directory = Directory(parts[0][1].parent, in_memory=True)
        persist, pinned = all(stamp.persist for stamp, _ in parts), any(stamp.pinned for stamp, _ in parts)
        metric = next((stamp.metric for stamp, _ in parts if stamp.rank == 0), None)
        found_here = StoredCopy(step, incarnation, parts[0][0].world, MEMORY, directory, ranks, persist)
        copies.append(replace(found_here, pinned=pinned, metric=metric))
    return copies


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that exists, in one place or in both."""

    step: int
    places: tuple[str, ...]
    """``memory`` (that of this node), ``storage``, or both."""
    world: int
    """Number of ranks that saved it."""
    generation: int
    """Number of the job's start that saved it."""
    pinned: bool = False
    """True while retention must not remove it on storage."""

    @property
    def durable(self) -> bool:
        return STORAGE in self.places


def list_checkpoints(job: JobDir | None, store: Store | None, local_ranks: Collection[int]) -> list[Checkpoint]:
    """Lists the complete checkpoints that this node can see, newest first, without the superseded ones."""
    found: dict[CheckpointKey, Checkpoint] = {}
    for copy in drop_superseded(find_copies(job, store, own=True)):
        if copy.place == STORAGE or copy.ranks.issuperset(local_ranks):
            known = found.get(copy.checkpoint)
            places = (*known.places, copy.place) if known else (copy.place,)
            pinned = copy.pinned or (known is not None and known.pinned)
            found[copy.checkpoint] = Checkpoint(copy.step, places, copy.world, copy.incarnation.generation, pinned)
    return list(found.values())
