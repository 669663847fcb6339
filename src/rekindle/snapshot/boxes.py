"""Boxes of a tensor's elements, and whether shards together hold all of every tensor that they speak of."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from rekindle.snapshot.documents import Receipt

__all__ = ["Box", "lacking", "overlapping", "tensors_in", "uncovered"]


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


def uncovered(whole: Box, boxes: Iterable[Box]) -> list[Box]:
    """What of ``whole`` is in none of ``boxes``."""
    rest = [whole] if whole.volume else []
    for box in sorted(set(boxes)):
        if not rest:
            break
        left = []
        for part in rest:
            common = part.meet(box)
            left += [part] if common is None else part.without(common)
        rest = left
    return rest


def overlapping(boxes: Iterable[Box]) -> bool:
    """Whether two of these boxes, each of which is there once, have elements in common."""
    found = list(boxes)
    return any(a.meet(b) is not None for number, a in enumerate(found) for b in found[:number])


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
    for receipt in receipts:
        rank = receipt.stamp.rank
        for chunk in receipt.layout.chunks:
            kind = chunk.dtype, chunk.global_shape
            if not chunk.own and kinds.setdefault(chunk.name, kind) != kind:
                return f"{chunk.name} is {_kind(*kind)} on rank {rank}, {_kind(*kinds[chunk.name])} on another"
            boxes[chunk.name].append(Box(chunk.offsets, chunk.sizes))
        for name in tensors_in(receipt.structure):
            named.setdefault(name, rank)
    for name, rank in named.items():
        if name not in boxes:
            return f"{name}, which rank {rank} speaks of, is in no shard"
    for name, (_, shape) in kinds.items():
        missing = uncovered(Box((0,) * len(shape), shape), boxes[name])
        if missing:
            return f"{name}{missing[0]} is in no shard"
    return None


def _kind(dtype: str, shape: tuple[int, ...]) -> str:
    return f"{dtype}{list(shape)}"
