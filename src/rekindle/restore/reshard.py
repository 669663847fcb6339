"""Plans reads of a checkpoint onto another shape: from what is wanted and what exists, who copies what.

Pure: boxes in, copies out. Nothing here reads anything, or knows of ranks, files or torch.
"""

from __future__ import annotations

import bisect
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from rekindle.format.boxes import Box, Remainder

__all__ = ["Have", "Move", "ReadPlan", "Want", "plan", "runs"]


class Want(NamedTuple):
    """A part of a tensor that is to be filled."""

    name: str
    box: Box


class Have(NamedTuple):
    """A part of a tensor that exists somewhere."""

    name: str
    box: Box
    cost: int = 0
    """Price of reading it: of several that hold the same element the cheapest is read."""


class Move(NamedTuple):
    """A copy: ``box`` is read from ``haves[have]``, and put into ``wants[want]``."""

    want: int
    have: int
    box: Box


@dataclass
class ReadPlan:
    """Moves that fill every wanted element exactly once, unless something is missing."""

    moves: list[Move] = field(default_factory=list)
    missing: list[Want] = field(default_factory=list)
    """Parts that are wanted and exist nowhere."""


def plan(wants: Sequence[Want], haves: Sequence[Have]) -> ReadPlan:
    """Plans who copies what. Takes time in proportion to the moves, for tensors that are cut up as a grid.

    Raises CorruptError when what exists is cut up as no tensor is.
    """
    found = ReadPlan()
    shelves: dict[str, _Shelf] = {}
    by_name: defaultdict[str, list[int]] = defaultdict(list)
    for number, have in enumerate(haves):
        if have.box.volume:
            by_name[have.name].append(number)
    for number, want in enumerate(wants):
        if not want.box.volume:
            continue
        if want.name not in shelves:
            shelves[want.name] = _Shelf(haves, by_name.get(want.name, []))
        near = shelves[want.name].near(want.box)
        rest = Remainder(want.box, len(near))
        for candidate in near:
            if not rest.parts:
                break
            found.moves += [Move(number, candidate, box) for box in rest.take(haves[candidate].box)]
        found.missing += [Want(want.name, box) for box in rest.parts]
    return found


class _Shelf:
    """The parts that exist of one tensor, in the order of each of its dimensions."""

    def __init__(self, haves: Sequence[Have], numbers: Iterable[int]) -> None:
        cheapest: dict[Box, int] = {}
        for number in numbers:
            box = haves[number].box
            if box not in cheapest or haves[number].cost < haves[cheapest[box]].cost:
                cheapest[box] = number
        self._haves = haves
        self._numbers = list(cheapest.values())
        dimensions = range(len(next(iter(cheapest)).offsets) if cheapest else 0)
        self._rows = [_Row([(number, haves[number].box) for number in self._numbers], d) for d in dimensions]
        self._priced = len({haves[number].cost for number in self._numbers}) > 1

    def near(self, box: Box) -> list[int]:
        """Numbers the parts that may overlap ``box``, the cheapest first, else in the order of their offsets."""
        spans = [row.span(box) for row in self._rows]
        d = min(range(len(spans)), key=lambda d: spans[d][1] - spans[d][0], default=None)
        near = self._numbers if d is None else self._rows[d].numbers[slice(*spans[d])]
        return sorted(near, key=lambda number: self._haves[number].cost) if self._priced else near


class _Row:
    """Numbers of parts, sorted by where they begin along one dimension."""

    def __init__(self, parts: list[tuple[int, Box]], along: int) -> None:
        parts.sort(key=lambda part: (part[1].offsets[along], part[1].offsets))
        self.numbers = [number for number, _ in parts]
        self._along = along
        self._starts = [box.offsets[along] for _, box in parts]
        self._longest = max(box.sizes[along] for _, box in parts)

    def span(self, box: Box) -> tuple[int, int]:
        """Returns the first and last, exclusive, that can overlap ``box`` along this dimension."""
        low, size = box.offsets[self._along], box.sizes[self._along]
        return bisect.bisect_right(self._starts, low - self._longest), bisect.bisect_left(self._starts, low + size)


def runs(box: Box, source: Box, target: Box, itemsize: int) -> Iterator[tuple[int, int, int]]:
    """Iterates over (first byte in ``source``, first byte in ``target``, bytes) of each run in one piece in both.

    Both hold their elements in row-major order; ``box`` lies inside of both. In the order of the bytes.
    """
    whole = len(box.sizes)  # from this dimension on, ``box`` is as wide as both: rows of it follow each other
    length = itemsize
    while whole and box.sizes[whole - 1] == source.sizes[whole - 1] == target.sizes[whole - 1]:
        whole -= 1
        length *= box.sizes[whole]
    if whole:
        whole -= 1  # along this one a run is as long as the box is wide
        length *= box.sizes[whole]
    steps = [_strides(holder, itemsize) for holder in (source, target)]
    starts = [
        sum((at - first) * step for at, first, step in zip(box.offsets, holder.offsets, stride, strict=True))
        for holder, stride in zip((source, target), steps, strict=True)
    ]
    yield from _walk(box.sizes[:whole], steps[0], steps[1], starts[0], starts[1], length)


def _walk(
    sizes: tuple[int, ...], a: Sequence[int], b: Sequence[int], at: int, to: int, length: int
) -> Iterator[tuple[int, int, int]]:
    if not sizes:
        yield at, to, length
        return
    for i in range(sizes[0]):
        yield from _walk(sizes[1:], a[1:], b[1:], at + i * a[0], to + i * b[0], length)


def _strides(box: Box, itemsize: int) -> list[int]:
    """Returns the bytes between neighbours along each dimension."""
    found = [itemsize] * len(box.sizes)
    for d in range(len(box.sizes) - 1, 0, -1):
        found[d - 1] = found[d] * box.sizes[d]
    return found
