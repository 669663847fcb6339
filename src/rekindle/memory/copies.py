"""Keeps copies of another node's snapshots: those of its ranks, for which this node stands in should it be lost.

They lie in ``others/``, as snapshots lie in a job's own directory, and are committed by the same renames. A copy may
hold less than the snapshot has: what other nodes hold too can be left out.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from functools import partial

from rekindle.errors import MemoryStoreError
from rekindle.format.layout import Layout
from rekindle.format.lineage import CheckpointKey, ShardId
from rekindle.memory.job_dir import JobDir, make_private
from rekindle.memory.recycling import keep_copies
from rekindle.memory.slot import Slot
from rekindle.memory.slots import Slots

__all__ = ["CopySlots"]


class CopySlots:
    """Writes and removes the copies of one node's snapshots. For one thread.

    Each rank has two slots, and a third one while somebody reads one of them. The copy of the newest node-safe step
    is never written over. Copies don't count as snapshots of this node: they are not drained, and no agent stays for
    them alone. It stays for the snapshots of its own ranks, of which it has one of each step that it keeps copies of.
    """

    def __init__(self, job: JobDir, ranks: Sequence[int], world: int, headroom: int) -> None:
        """``ranks``: those of the node that is copied. ``headroom``: bytes of the file system that must stay free."""
        self._job = job
        self._ranks = frozenset(ranks)
        rule = partial(keep_copies, job.notes)
        self._slots = {rank: Slots(job.copies, rank, world, ranks, headroom=headroom, rule=rule) for rank in ranks}

    def adopt(self) -> None:
        """Takes over the files of an earlier agent of this node. Called once. Raises OSError."""
        for slots in self._slots.values():
            slots.adopt()

    def write(
        self,
        stamp: ShardId,
        layout: Layout,
        fill: Callable[[memoryview], list[str]],
        encode: Callable[[list[str]], bytes],
    ) -> None:
        """Writes and commits the copy of ``stamp``.

        ``fill`` writes all data of ``layout`` into the view that it is given, which nobody may use once it has ended,
        and returns the checksums of its blocks. ``encode`` makes the receipt of them. After an error there is no copy
        of the step, and those of other steps are as they were or given up. Raises MemoryStoreError without room.
        """
        slots = self._slots[stamp.rank]
        try:
            self._make_directories()
            slot = slots.acquire(stamp.step, stamp.incarnation, layout.file_bytes)
            try:
                receipt = encode(fill(_data(slot, layout)))
            except BaseException:
                slot.unlock()
                raise
            slots.commit(slot, stamp, receipt)
        except MemoryStoreError:
            with suppress(OSError):
                slots.recover()  # somebody may have removed the files
            raise

    def has(self, key: CheckpointKey, ranks: Collection[int]) -> bool:
        """True if there are copies of a checkpoint of all these ranks."""
        found = {stamp.rank for stamp, _ in self._job.copies.snapshots.shard_ids() if stamp.checkpoint == key}
        return found.issuperset(ranks)

    def tidy(self, keep_ranks: Collection[int]) -> None:
        """Removes copies of other ranks than ``keep_ranks``, of which another node keeps copies now.

        They stay until storage has a step that is no older, or there are copies of a newer one here. Those of the
        newest node-safe step stay until there is a newer one of these. Raises OSError.
        """
        snapshots, marks, durable = self._job.copies.snapshots, self._job.notes.marks(), self._job.notes.durable()
        found = list(snapshots.shard_ids())
        newest = self._newest_complete([stamp for stamp, _ in found])

        def is_needed(stamp: ShardId) -> bool:
            if durable is not None and durable >= stamp.step:
                return False
            safe = marks is not None and (stamp.incarnation.id, stamp.step) == marks.safe
            return safe or newest is None or _age(stamp.checkpoint) >= _age(newest)

        spared = {path for stamp, path in found if is_needed(stamp)}
        for rank in snapshots.ranks().difference(keep_ranks):
            snapshots.remove_shards(rank, spared)

    def close(self) -> None:
        """Closes all files. They stay. May be called again."""
        for slots in self._slots.values():
            slots.close()

    def _newest_complete(self, stamps: Sequence[ShardId]) -> CheckpointKey | None:
        """Returns the newest checkpoint of which there are copies of all ranks of the node."""
        ranks: dict[CheckpointKey, set[int]] = {}
        for stamp in stamps:
            ranks.setdefault(stamp.checkpoint, set()).add(stamp.rank)
        return max((key for key, have in ranks.items() if have >= self._ranks), key=_age, default=None)

    def _make_directories(self) -> None:
        """Makes the directories of the copies, if the job's own is there. Raises MemoryStoreError."""
        for path in (self._job.copies.path, self._job.copies.paths.slots):
            make_private(path)


def _data(slot: Slot, layout: Layout) -> memoryview:
    """Writes the header, and returns the place of the data."""
    assert slot.map is not None
    start = len(layout.header)
    slot.map[:start] = layout.header
    return memoryview(slot.map)[start : layout.file_bytes]


def _age(key: CheckpointKey) -> tuple[int, int]:
    return key.incarnation.generation, key.step
