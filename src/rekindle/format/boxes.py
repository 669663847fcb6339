"""Computes with boxes of a tensor's elements: intersections, remainders, gaps."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

from rekindle.errors import CorruptError

__all__ = ["Box", "Remainder", "uncovered"]


class Box(NamedTuple):
    """A box of a tensor's elements, in elements of each dimension. A scalar is a box of no dimensions, volume 1."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def volume(self) -> int:
        """Number of elements."""
        return math.prod(self.sizes)

    def intersect(self, other: Box) -> Box | None:
        """Returns the box that both have in common; None if there is none."""
        offsets, sizes = [], []
        for a, m, b, n in zip(self.offsets, self.sizes, other.offsets, other.sizes, strict=True):
            low, high = a if a > b else b, min(a + m, b + n)
            if low >= high:
                return None
            offsets.append(low)
            sizes.append(high - low)
        return Box(tuple(offsets), tuple(sizes))

    def without(self, inner: Box) -> list[Box]:
        """Returns the rest as boxes that don't overlap, at most two for each dimension. ``inner`` must lie inside."""
        rest: list[Box] = []
        offsets, sizes = list(self.offsets), list(self.sizes)
        for d, (low, size) in enumerate(zip(inner.offsets, inner.sizes, strict=True)):
            first, last = offsets[d], offsets[d] + sizes[d]
            for start, stop in ((first, low), (low + size, last)):
                if start < stop:
                    rest.append(
                        Box((*offsets[:d], start, *offsets[d + 1 :]), (*sizes[:d], stop - start, *sizes[d + 1 :]))
                    )
            offsets[d], sizes[d] = low, size
        return rest

    def __str__(self) -> str:
        pairs = zip(self.offsets, self.sizes, strict=True)
        return "[" + ", ".join(f"{at}:{at + size}" for at, size in pairs) + "]"


class Remainder:
    """Tracks the parts of a box that are left while others are taken from it.

    A tensor that is cut up as a grid leaves a few parts at any time; their number times that of the boxes is the work.
    Forged boxes can leave as many parts as there are boxes. The work is bounded, so that they cost a CorruptError
    instead of hours.
    """

    def __init__(self, whole: Box, expected: int) -> None:
        """Starts with all of ``whole``. ``expected`` is the number of boxes that will be taken."""
        self.parts = [whole] if whole.volume else []
        self._work = 20_000 + 50 * expected

    def take(self, box: Box) -> list[Box]:
        """Takes ``box`` away and returns the parts of it that were left. Raises CorruptError beyond the bound."""
        self._work -= len(self.parts)
        if self._work < 0:
            raise CorruptError(f"the boxes of a tensor, such as {box}, divide it as no sharding does")
        taken, left = [], []
        for part in self.parts:
            common = part.intersect(box)
            if common is None:
                left.append(part)
            else:
                taken.append(common)
                left += part.without(common)
        self.parts = left
        return taken


def uncovered(whole: Box, boxes: Iterable[Box]) -> list[Box]:
    """Returns the parts of ``whole`` that none of ``boxes`` covers. Raises CorruptError for boxes of no sharding."""
    distinct = sorted(set(boxes))
    remainder = Remainder(whole, len(distinct))
    for box in distinct:
        if not remainder.parts:
            break
        remainder.take(box)
    return remainder.parts
