"""Decides if there is room for more of a rank's slots, beside those of the node's other ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rekindle.memory.job_dir import JobDir
from rekindle.memory.slot import Slot

__all__ = ["RankRoom"]

_SLACK = 1 << 20
"""Bytes that a third slot leaves free, for receipts and the job's small files."""


@dataclass(frozen=True)
class RankRoom:
    """Knows the bounds of a rank's slots. All ranks of a node are taken to need the same at the same time."""

    job: JobDir
    ranks: int
    """Number of the node's ranks."""
    limit: int | None
    """Most bytes that the rank may hold; None for no limit."""
    headroom: int
    """Bytes of the file system that stay free for other programs."""

    def within_limit(self, count: int, nbytes: int) -> bool:
        """Returns True if ``count`` slots of ``nbytes`` are within the limit."""
        return self.limit is None or count * nbytes <= self.limit

    def leaves_headroom(self, more: int, beside: int = 0) -> bool:
        """Returns True if each rank can take ``more`` bytes and the headroom stays, and ``beside`` bytes for others."""
        stays = self.headroom + beside
        return more <= 0 or not stays or self.job.free_bytes() - more * self.ranks >= stays

    def has_one_more(self, slots: Sequence[Slot], nbytes: int) -> bool:
        """Returns True if all ``slots`` and one more can be of so many bytes, beside two copies of each."""
        copies = max(0, 2 * nbytes * self.ranks - self.job.copies.held_bytes())
        more = nbytes + _lacking(slots, nbytes)
        return self.within_limit(len(slots) + 1, nbytes) and self.leaves_headroom(more, copies)

    def has_third(self, slots: Sequence[Slot], nbytes: int) -> bool:
        """Returns True if two ``slots`` and a third one can be of so many bytes, and no other rank lacks it then."""
        more = (nbytes + _lacking(slots, nbytes)) * self.ranks
        return self.within_limit(3, nbytes) and self.job.free_bytes() - more >= self.headroom + _SLACK

    def has_larger(self, slots: Sequence[Slot], nbytes: int) -> bool:
        """Returns True if all ``slots`` can be of so many bytes."""
        more = _lacking(slots, nbytes) * self.ranks
        return self.within_limit(len(slots), nbytes) and more <= self.job.free_bytes() - self.headroom


def _lacking(slots: Sequence[Slot], nbytes: int) -> int:
    return sum(max(0, nbytes - slot.held) for slot in slots)
