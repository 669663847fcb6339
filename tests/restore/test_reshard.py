"""The planner against a brute-force reference that looks at every element."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rekindle.format.boxes import Box
from rekindle.restore.reshard import Have, Move, Want, plan, runs

SHAPES = st.lists(st.integers(1, 5), max_size=3).map(tuple)


@st.composite
def boxes_of(draw: st.DrawFn, shape: tuple[int, ...]) -> Box:
    """Any box inside of a tensor, an empty one included."""
    offsets, sizes = [], []
    for size in shape:
        low = draw(st.integers(0, size))
        offsets.append(low)
        sizes.append(draw(st.integers(0, size - low)))
    return Box(tuple(offsets), tuple(sizes))


@st.composite
def problems(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Want], list[Have]]:
    shape = draw(SHAPES)
    names = st.sampled_from(["a", "b"])
    wants = draw(st.lists(st.builds(Want, names, boxes_of(shape)), max_size=4))
    haves = draw(st.lists(st.builds(Have, names, boxes_of(shape), st.integers(0, 2)), max_size=8))
    return shape, wants, haves


def elements(box: Box) -> set[tuple[int, ...]]:
    return set(itertools.product(*(range(at, at + n) for at, n in zip(box.offsets, box.sizes, strict=True))))


@given(problems())
def test_every_element_comes_once_from_the_cheapest_that_has_it(
    problem: tuple[tuple[int, ...], list[Want], list[Have]],
) -> None:
    _, wants, haves = problem
    found = plan(wants, haves)
    for number, want in enumerate(wants):
        filled: dict[tuple[int, ...], int] = {}
        for move in found.moves:
            if move.want == number:
                for element in elements(move.box):
                    assert element not in filled, "filled twice"
                    assert haves[move.have].name == want.name and element in elements(haves[move.have].box)
                    filled[element] = haves[move.have].cost
        for element in elements(want.box):
            costs = [have.cost for have in haves if have.name == want.name and element in elements(have.box)]
            assert filled.pop(element, None) == (min(costs) if costs else None)
        assert not filled, "more than was wanted"
    for name in ("a", "b"):
        wanted = {e for w in wants if w.name == name for e in elements(w.box)}
        there = {e for h in haves if h.name == name for e in elements(h.box)}
        assert {e for w in found.missing if w.name == name for e in elements(w.box)} == wanted - there


@given(st.data(), SHAPES)
def test_runs_move_the_same_bytes_as_slicing(data: st.DataObject, shape: tuple[int, ...]) -> None:
    source, target = data.draw(boxes_of(shape)), data.draw(boxes_of(shape))
    box = source.intersect(target)
    if box is None:
        return
    whole = np.arange(np.prod(shape, dtype=int), dtype=np.int16).reshape(shape)

    def cut(part: Box, within: Box | None = None) -> tuple[slice, ...]:
        first = within.offsets if within else (0,) * len(shape)
        return tuple(slice(o - f, o - f + n) for o, f, n in zip(part.offsets, first, part.sizes, strict=True))

    read = whole[cut(source)].tobytes()
    filled = bytearray(2 * target.volume)
    moved = list(runs(box, source, target, 2))
    for at, to, nbytes in moved:
        filled[to : to + nbytes] = read[at : at + nbytes]
    expected = np.zeros(target.sizes, np.int16)
    expected[cut(box, target)] = whole[cut(box)]
    assert bytes(filled) == expected.tobytes()
    assert sum(nbytes for *_, nbytes in moved) == 2 * box.volume
    assert moved == sorted(moved)


@given(st.data(), SHAPES)
def test_a_box_and_its_rest(data: st.DataObject, shape: tuple[int, ...]) -> None:
    outer = data.draw(boxes_of(shape))
    inner = outer.intersect(data.draw(boxes_of(shape)))
    if inner is None:
        return
    rest = outer.without(inner)
    assert sum(box.volume for box in rest) == outer.volume - inner.volume
    assert set().union(*map(elements, rest)) == elements(outer) - elements(inner)
    assert len(rest) <= 2 * len(shape)


@pytest.mark.parametrize(("ranks", "parts"), [(1, 4), (2, 2), (3, 2), (4, 1), (6, 2)])
def test_four_ranks_to_another_number(ranks: int, parts: int) -> None:
    """Twelve rows, cut up for four ranks: a reader of some of them takes from no more parts than it has to."""
    haves = [Have("w", Box((3 * rank, 0), (3, 8))) for rank in range(4)]
    rows = 12 // ranks
    found = plan([Want("w", Box((rows * rank, 0), (rows, 8))) for rank in range(ranks)], haves)
    assert not found.missing
    assert max(sum(move.want == rank for move in found.moves) for rank in range(ranks)) == parts


def test_what_is_missing_has_a_name_and_a_range() -> None:
    haves = [Have("w", Box((0, 0), (4, 8))), Have("w", Box((8, 0), (4, 8)))]
    found = plan([Want("w", Box((0, 0), (12, 8)))], haves)
    assert found.missing == [Want("w", Box((4, 0), (4, 8)))]
    assert str(found.missing[0].box) == "[4:8, 0:8]"


def test_a_scalar_has_one_element() -> None:
    scalar = Box((), ())
    assert plan([Want("n", scalar)], [Have("n", scalar)]).moves == [Move(0, 0, scalar)]
    assert list(runs(scalar, scalar, scalar, 8)) == [(0, 0, 8)]
    assert plan([Want("n", scalar)], []).missing == [Want("n", scalar)]
