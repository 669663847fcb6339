"""Boxes of a tensor's elements, and whether shards together hold all of every tensor that they speak of."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from rekindle.errors import CorruptError

if TYPE_CHECKING:
    from rekindle.format.lineage import ShardId
    from rekindle.format.receipt import Receipt

__all__ = ["Box", "Rest", "lacking", "tensors_in", "uncovered"]


class Box(NamedTuple):
    """A box of a tensor's elements. A scalar is the box of no dimensions, of one element."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def volume(self) -> int:
        return math.prod(self.sizes)

    def meet(self, other: Box) -> Box | None:
        """What two boxes have in common; None when that is nothing."""
        offsets, sizes = [], []
        for a, m, b, n in zip(self.offsets, self.sizes, other.offsets, other.sizes, strict=True):
            low, high = a if a > b else b, min(a + m, b + n)
            if low >= high:
                return None
            offsets.append(low)
            sizes.append(high - low)
        return Box(tuple(offsets), tuple(sizes))

    def without(self, inner: Box) -> list[Box]:
        """The rest, in boxes that don't overlap: at most two for each dimension. ``inner`` lies inside."""
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


class Rest:
    """What is left of a box while others are taken from it.

    A tensor that is cut up as a grid leaves a few parts at any time, whose number times that of the boxes is the work.
    Boxes that were made up can leave as many parts as there are boxes: then it is given up, with a CorruptError.
    """

    def __init__(self, whole: Box, pieces: int) -> None:
        """``pieces`` is the number of boxes to be expected."""
        self.parts = [whole] if whole.volume else []
        self._work = 20_000 + 50 * pieces

    def take(self, box: Box) -> list[Box]:
        """Take ``box`` away; what it had of the rest."""
        self._work -= len(self.parts)
        if self._work < 0:
            raise CorruptError(f"what shards say that they hold is cut up as no tensor is, in some place at {box}")
        found, left = [], []
        for part in self.parts:
            common = part.meet(box)
            if common is None:
                left.append(part)
            else:
                found.append(common)
                left += part.without(common)
        self.parts = left
        return found


def uncovered(whole: Box, boxes: Iterable[Box]) -> list[Box]:
    """What of ``whole`` is in none of ``boxes``. Raises CorruptError for boxes that no sharding makes."""
    there = sorted(set(boxes))
    rest = Rest(whole, len(there))
    for box in there:
        if not rest.parts:
            break
        rest.take(box)
    return rest.parts


def tensors_in(structure: Any) -> Iterator[str]:
    """Names of all tensors that a receipt's structure speaks of."""
    if isinstance(structure, list):
        for child in structure:
            yield from tensors_in(child)
    elif isinstance(structure, dict):
        if isinstance(structure.get("$tensor"), str):
            yield structure["$tensor"]
        else:
            yield from tensors_in(list(structure.values()))


def lacking(receipts: Iterable[Receipt]) -> str | None:
    """What is wrong with shards that are to make up a checkpoint: what is said of a tensor twice, or is nowhere.

    None when every tensor that one of them speaks of is there with all its elements.
    """
    boxes: defaultdict[str, list[Box]] = defaultdict(list)
    kinds: dict[str, tuple[str, tuple[int, ...]]] = {}
    named: dict[str, int] = {}
    first: ShardId | None = None
    for receipt in receipts:
        rank = receipt.stamp.rank
        first = first or receipt.stamp
        if receipt.stamp.save != first.save:
            return f"rank {rank}'s shard is of another save than rank {first.rank}'s"
        for chunk in receipt.layout.chunks:
            kind = chunk.dtype, chunk.global_shape
            there = boxes[chunk.name]
            if chunk.own:
                continue
            if kinds.setdefault(chunk.name, kind) != kind:
                return f"{chunk.name} is {_kind(*kind)} on rank {rank}, {_kind(*kinds[chunk.name])} on another"
            there.append(Box(chunk.offsets, chunk.sizes))
        for name in tensors_in(receipt.structure):
            named.setdefault(name, rank)
    for name, rank in named.items():
        if name not in boxes:
            return f"{name}, which rank {rank} speaks of, is in no shard"
    for name, (_, shape) in kinds.items():
        try:
            missing = uncovered(Box((0,) * len(shape), shape), boxes[name])
        except CorruptError as error:
            return f"{name}: {error}"
        if missing:
            return f"{name}{missing[0]} is in no shard"
    return None


def _kind(dtype: str, shape: tuple[int, ...]) -> str:
    return f"{dtype}{list(shape)}"
