"""Chooses the copies of a lost node's snapshots that this node brings to storage in its stead."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import replace

from rekindle.format.lineage import CheckpointKey, ShardId
from rekindle.memory.job_dir import JobDir
from rekindle.storage.catalog import StoredCopy, find_copies

__all__ = ["StandIn"]


class StandIn:
    """Knows which of the checkpoints that wait on storage for a lost node this node can complete. For one thread.

    While ranks train on this node nobody stands in: they have gone on from the copies, and save again.
    """

    def __init__(self, job: JobDir, lost_ranks: Callable[[], Collection[int]]) -> None:
        """``lost_ranks`` returns the ranks of a lost node whose snapshots this node keeps copies of."""
        self._job, self._lost_ranks = job, lost_ranks
        self._over: set[CheckpointKey] = set()

    def due(self, waiting: Iterable[ShardId]) -> tuple[StoredCopy, list[ShardId]] | None:
        """Returns the copies for the newest of the ``waiting`` checkpoints, and the shards to write; None without any.

        The same ones again until they are ``over``.
        """
        todo = sorted((shard for shard in waiting if shard.checkpoint not in self._over), key=lambda s: s.checkpoint)
        lost = self._lost_ranks() if todo and not self._job.trainers() else ()
        if not lost:
            return None
        copies = {copy.checkpoint: copy for copy in find_copies(self._job.copies, None, own=True)}
        for shard in reversed(todo):
            copy = copies.get(shard.checkpoint)
            if copy is not None and copy.ranks.issuperset(lost):
                return copy, [replace(copy.stamp, rank=rank) for rank in lost]
        return None

    def over(self, key: CheckpointKey) -> None:
        """Records that storage has the copies of a checkpoint, or can't get them."""
        self._over.add(key)
