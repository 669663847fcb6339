"""Chooses which snapshot of this node's memory storage gets next."""

from __future__ import annotations

import math
import time
from collections.abc import Collection
from dataclasses import replace

from rekindle.agent.pause import pause_of
from rekindle.format.lineage import CheckpointKey, Incarnation, drop_superseded
from rekindle.memory.job import JobInfo
from rekindle.memory.job_dir import JobDir
from rekindle.storage.catalog import StoredCopy, find_copies
from rekindle.storage.open import open_store
from rekindle.storage.throttle import drain_interval

__all__ = ["Backlog", "local_ranks"]

_RECHECK = 30.0
"""Seconds between looks at whether what has become durable is still there: somebody may have put an older copy of the
root in its place."""


class Backlog:
    """Lists the snapshots of this node's memory that storage may get, and remembers those that it needs no more."""

    def __init__(self, job: JobDir) -> None:
        self._job = job
        self._done: CheckpointKey | None = None
        """Newest checkpoint that storage was seen to have, or not to need."""
        self._recheck_at = 0.0
        self._given_up: set[CheckpointKey] = set()
        self._look_at = 0.0
        """When to look again for shards that a rank of this node has put straight on storage: each look costs a request
        for each of them."""

    def complete(self, info: JobInfo, *, look: bool = True) -> list[StoredCopy]:
        """Returns live snapshots, newest first, of which this node has all shards, in memory or on storage.

        Without ``look`` nothing is asked of storage: those that have all shards in memory are returned.
        """
        store = open_store(info.root)

        def has_all(copy: StoredCopy) -> bool:
            # A rank that found no room in memory has put its shard straight into the unfinished checkpoint.
            missing = set(local_ranks(info, copy)) - copy.ranks
            return not missing or (look and all(store.has_shard(replace(copy.stamp, rank=rank)) for rank in missing))

        copies = drop_superseded(find_copies(self._job, None, own=True))
        return [copy for copy in copies if copy.checkpoint not in self._given_up and has_all(copy)]

    def candidates(self, info: JobInfo, unfinished: Collection[CheckpointKey]) -> list[StoredCopy]:
        """Returns the snapshots that may be drained now, newest first, without the ``unfinished`` ones."""
        trained = bool(self._job.trainers())
        look = not trained or time.monotonic() >= self._look_at
        copies = [copy for copy in self.complete(info, look=look) if copy.checkpoint not in unfinished]
        if look:
            self._look_at = time.monotonic() + open_store(info.root).poll
        if unfinished and not trained:  # a node that is lost does not finish them
            copies.sort(key=self._is_node_safe, reverse=True)
        if copies and copies[0].checkpoint != self._done and trained and not self._due(info):
            marked = self._marked(info)
            # A shard that a rank has put on storage itself waits there for the others, which memory keeps no longer.
            return [
                copy
                for copy in copies
                if copy.persist
                or (copy.incarnation.id, copy.step) == marked
                or not copy.ranks.issuperset(local_ranks(info, copy))
            ]
        return copies

    def next_of(self, candidates: list[StoredCopy]) -> StoredCopy | None:
        """Returns the newest one, None if it is done; before it, oldest first, those that are to be pinned.

        None of these comes to storage after a newer one.
        """
        ahead = (copy for copy in candidates[::-1] if copy.pinned and self._beyond_done(copy))
        copy = next(ahead, next(iter(candidates), None))
        if copy is None or (copy.checkpoint == self._done and time.monotonic() < self._recheck_at):
            return None
        return copy

    def mark_done(self, key: CheckpointKey) -> None:
        """Records that storage has a checkpoint, or needs it no more. Storage is asked again after a while."""
        self._done, self._recheck_at = key, time.monotonic() + _RECHECK

    def give_up(self, key: CheckpointKey) -> None:
        """Records that a checkpoint is never to be drained: it is damaged, or was withdrawn for newer ones."""
        self._given_up.add(key)

    def starts(self) -> set[Incarnation]:
        """Returns the starts of the job that have snapshots in this node's memory."""
        return {copy.incarnation for copy in find_copies(self._job, None, own=True)}

    def _beyond_done(self, copy: StoredCopy) -> bool:
        return self._done is None or copy.checkpoint > self._done

    def _due(self, info: JobInfo) -> bool:
        """True if storage may get any snapshot unasked, and no other node drains."""
        return not info.host and time.monotonic() >= self.due_at(info)

    def due_at(self, info: JobInfo) -> float:
        """Returns when the last drain is long enough ago for the next one that nobody asks for; infinite for never.

        That drain is noted in a file, so a restart of the agent changes nothing. A clock that was set back, as by a new
        boot where memory outlives it, costs one drain too many.
        """
        if info.persist_seconds is None:
            return math.inf
        began, seconds = self._job.notes.last_drain() or (-math.inf, 0.0)
        if time.monotonic() - began < seconds:
            return -math.inf
        return began + drain_interval(pause_of(self._job, info), seconds)

    def _is_node_safe(self, copy: StoredCopy) -> bool:
        """True for the newest step that needs no node which is lost, unless storage was seen to have it."""
        marks = self._job.notes.marks()
        safe = marks is not None and (copy.incarnation.id, copy.step) == marks.safe
        return safe and copy.checkpoint != self._done

    def _marked(self, info: JobInfo) -> tuple[str, int] | None:
        """Returns the start and the step that all nodes have marked for storage, as time decides; None for none."""
        common = self._job.notes.common() if info.host and info.persist_seconds is not None else None
        return None if common is None else (common.start, common.drain)


def local_ranks(info: JobInfo, copy: StoredCopy) -> list[int]:
    """Returns this node's ranks in the start that wrote the copy; if these were others than now, those found here."""
    same = copy.world == info.world and not copy.ranks.isdisjoint(info.ranks)
    return info.ranks if same else sorted(copy.ranks)
