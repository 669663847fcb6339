"""Who copies what: over all ranks everything once, in about equal parts, worked out by each rank alone."""

from __future__ import annotations

from collections import Counter
from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from rekindle.format.boxes import Box, uncovered
from rekindle.save.partition import Item, partition

sizes = st.lists(st.integers(1, 5), max_size=3).map(tuple)
items = st.lists(sizes, max_size=8).map(
    lambda found: [Item(f"t{n}", Box((0,) * len(s), s), 4) for n, s in enumerate(found)]
)


def elements(box: Box) -> list[tuple[int, ...]]:
    return list(product(*(range(at, at + size) for at, size in zip(*box, strict=True))))


@given(items, st.integers(1, 6))
def test_every_element_is_copied_once(found: list[Item], ranks: int) -> None:
    copied = Counter(
        (item.name, element)
        for number in range(ranks)
        for item, box in partition(found, number, ranks)
        for element in elements(box)
    )
    assert copied == Counter((item.name, element) for item in found for element in elements(item.box))


@given(items, st.integers(1, 6), st.randoms())
def test_ranks_that_know_the_same_in_another_order_agree(found: list[Item], ranks: int, random) -> None:
    mixed = list(found)
    random.shuffle(mixed)
    assert [partition(found, n, ranks) for n in range(ranks)] == [partition(mixed, n, ranks) for n in range(ranks)]


def test_large_tensors_are_divided_between_rows() -> None:
    """300 MB in three tensors of very different sizes, over 7 ranks: each gets its seventh, but for a row."""
    shapes = {"embedding": (50_000, 1024), "head": (1000, 1024), "block": (24_000, 1024)}
    found = [Item(name, Box((0, 0), shape), 4) for name, shape in shapes.items()]
    total = sum(item.nbytes for item in found)
    for number in range(7):
        part = partition(found, number, 7)
        assert abs(sum(box.volume * 4 for _, box in part) - total / 7) <= 2 * 4096
        assert len({item.name for item, _ in part}) == len(part), "one box of each tensor, so that each keeps its name"
    for item in found:
        boxes = [box for n in range(7) for other, box in partition(found, n, 7) if other == item]
        assert uncovered(item.box, boxes) == []
