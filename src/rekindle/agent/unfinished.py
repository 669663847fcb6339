"""Keeps count of checkpoints of which storage has this node's shards and lacks those of other nodes."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress

from rekindle.errors import FormatError
from rekindle.format.lineage import CheckpointKey, ShardId
from rekindle.memory.job_dir import JobDir
from rekindle.memory.nodes import Nodes
from rekindle.storage.checks import describe_missing_shards
from rekindle.storage.store import Store

__all__ = ["Unfinished"]

log = logging.getLogger("rekindle.agent")

_OTHER_NODES = 0.2
"""Seconds between looks at whether the other nodes have finished their shards."""
_OVERDUE, _TELL_EVERY = 60.0, 30.0
"""Seconds that other nodes get before somebody is told of it, and between two looks whose shard is missing."""
_MOST = 3
"""Checkpoints of which this node leaves its shards on storage. Those that other nodes just write stay besides."""
_MOST_TOGETHER = 6
"""The same where all nodes keep steps together: one of them is the newest that can be had without a lost node."""


class Unfinished:
    """Holds one node's unfinished checkpoints. The last node to finish publishes them, and the others ask for that."""

    def __init__(self, job: JobDir) -> None:
        self._job = job
        self._waiting: dict[CheckpointKey, tuple[ShardId, float]] = {}
        """A shard of this node, and since when it waits."""
        self._ask_at = 0.0
        self._describe_at = 0.0
        self.problem: str | None = None
        """Whose shard of a checkpoint another node has not brought for a while; None while nobody is late."""

    def keys(self) -> set[CheckpointKey]:
        return set(self._waiting)

    def shards(self) -> list[ShardId]:
        """Returns a shard of each one."""
        return [shard for shard, _ in self._waiting.values()]

    def add(self, store: Store, shards: Sequence[ShardId]) -> list[CheckpointKey]:
        """Adds a checkpoint of which this node has written ``shards``.

        Returns older ones that are given up, shards and all: nodes that never come must not make this one fill storage.
        One that is to be pinned stays, and there is one at a time.
        """
        first = shards[0]
        self._waiting[first.checkpoint] = first, time.monotonic()
        most = _MOST if self._job.notes.marks() is None else _MOST_TOGETHER
        pinned = {shard.step for shard in self.shards() if shard.pinned}
        steps = store.withdraw(first, [shard.rank for shard in shards], most, pinned)
        withdrawn = [CheckpointKey(step, first.incarnation) for step in steps]
        for key in withdrawn:
            self._waiting.pop(key, None)
        return withdrawn

    def remove(self, key: CheckpointKey) -> None:
        del self._waiting[key]

    def due(self, store: Store) -> Iterator[ShardId]:
        """Yields a shard of each one, if it is time to ask again whether the others have finished."""
        if not self._waiting or time.monotonic() < self._ask_at:
            return
        self._ask_at = time.monotonic() + max(_OTHER_NODES, store.poll)
        yield from self.shards()

    def report_if_overdue(self, store: Store, key: CheckpointKey) -> None:
        """Names the missing shards of a checkpoint that has waited for long."""
        if time.monotonic() >= self._waiting[key][1] + _OVERDUE:
            self.report(store, key)

    def report(self, store: Store, key: CheckpointKey) -> None:
        """Names the missing shards of a checkpoint, if it waits; not again for a while, as that costs many requests."""
        if key not in self._waiting or time.monotonic() < self._describe_at:
            return
        self._describe_at = time.monotonic() + _TELL_EVERY
        before, self.problem = self.problem, self._describe(store, self._waiting[key][0])
        if self.problem not in (None, before):
            log.warning("%s", self.problem)

    def _describe(self, store: Store, shard: ShardId) -> str | None:
        nodes = None
        with suppress(OSError, FormatError):
            nodes = Nodes.read(self._job)
        return describe_missing_shards(store, shard, nodes)
