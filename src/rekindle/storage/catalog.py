"""What exists, and where: every copy of every checkpoint that this node can see."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

from rekindle.snapshot.files import Directory, Files
from rekindle.snapshot.lineage import Incarnation, Stamp, live
from rekindle.snapshot.memory import JobDir
from rekindle.storage.contract import Store

__all__ = ["MEMORY", "STORAGE", "Copy", "newest_stored", "survey"]

MEMORY = "memory"
STORAGE = "storage"


@dataclass(frozen=True)
class Copy:
    """One checkpoint, or this node's part of one, in one store."""

    step: int
    incarnation: Incarnation
    world: int
    place: str
    """``memory`` or ``storage``."""
    files: Files
    ranks: frozenset[int]
    """Ranks whose shards are there; all of them on storage."""
    persist: bool

    @property
    def key(self) -> tuple[int, Incarnation]:
        return self.step, self.incarnation

    @property
    def stamp(self) -> Stamp:
        return Stamp(self.step, 0, self.world, self.incarnation, self.persist)


def survey(job: JobDir | None, store: Store | None) -> list[Copy]:
    """All copies in this node's memory and on storage, newest first, memory before storage.

    Raises OSError when storage can't be listed.
    """
    copies = [] if job is None else _in_memory(job.stamps())
    if store is not None:
        for entry in store.published():
            stamp = entry.stamp
            everyone = frozenset(range(stamp.world))
            copies.append(Copy(stamp.step, stamp.incarnation, stamp.world, STORAGE, entry.files, everyone, True))
    return sorted(copies, key=lambda c: (*c.key, c.place == MEMORY), reverse=True)


def newest_stored(copies: Collection[Copy], base: tuple[int, Incarnation] | None) -> int | None:
    """The newest step that storage has for a start which goes on from ``base``, wherever it has that from."""
    if base is None:
        return None
    stands = [copy for copy in live(copies) if copy.place == STORAGE]
    return max((copy.step for copy in stands if copy.key == base or copy.step < base[0]), default=None)


def _in_memory(stamps: Iterable[tuple[Stamp, Path]]) -> list[Copy]:
    found: dict[tuple[int, Incarnation], list[tuple[Stamp, Path]]] = {}
    for stamp, path in stamps:
        found.setdefault(stamp.key, []).append((stamp, path))
    copies = []
    for (step, incarnation), parts in found.items():
        parts = [part for part in parts if part[0].world == parts[0][0].world]
        ranks = frozenset(stamp.rank for stamp, _ in parts)
        directory = Directory(parts[0][1].parent, in_memory=True)
        persist = all(stamp.persist for stamp, _ in parts)
        copies.append(Copy(step, incarnation, parts[0][0].world, MEMORY, directory, ranks, persist))
    return copies
