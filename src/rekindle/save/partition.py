"""Divides among the ranks of a node the copying of what several of them hold: a pure function, run by each alone.

Ranks that hold the same boxes know the same list of them, and so come to the same answer without a word. Laid end to
end the boxes are a line, which is cut into equal parts, one for each rank; a box over a cut is divided between rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from rekindle.format.boxes import Box

__all__ = ["Item", "partition"]

_SMALL = 1 << 20
"""Bytes up to which a box is not divided: it goes where its middle lies."""


class Item(NamedTuple):
    """A box of a tensor that several ranks hold."""

    name: str
    box: Box
    itemsize: int

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.box.volume * self.itemsize


def partition(items: Sequence[Item], number: int, ranks: int) -> list[tuple[Item, Box]]:
    """Returns what the ``number``-th of ``ranks`` copies of ``items``: at most one box of each, a run of its rows.

    Over all ranks every element is there exactly once. No rank gets more than its equal part and one row, or 1 MiB.
    """
    order = sorted(items, key=lambda item: (item.name, item.box))
    total = sum(item.nbytes for item in order)
    low, high = total * number // ranks, total * (number + 1) // ranks
    found, at = [], 0
    for item in order:
        first, last = _rows(item, low - at, high - at)
        if first < last:
            offsets, sizes = item.box
            rows = Box((offsets[0] + first, *offsets[1:]), (last - first, *sizes[1:])) if sizes else item.box
            found.append((item, rows))
        at += item.nbytes
    return found


def _rows(item: Item, low: int, high: int) -> tuple[int, int]:
    """Returns the first and last, exclusive, of the box's rows that lie from byte ``low`` to ``high`` of it."""
    rows = item.box.sizes[0] if item.box.sizes else 1
    if item.nbytes <= _SMALL or rows == 1:
        middle = item.nbytes // 2
        return (0, rows) if low <= middle < high else (0, 0)
    row = item.nbytes // rows
    return min(max(-(-low // row), 0), rows), min(max(-(-high // row), 0), rows)
