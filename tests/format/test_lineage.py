"""Incarnations, and what they leave behind."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rekindle.errors import FormatError
from rekindle.format.lineage import Incarnation, ShardId, superseded_by

FIRST = Incarnation(1, "a" * 16)


def after(generation: int, parent_step: int) -> Incarnation:
    return Incarnation(generation, "b" * 16, "a" * 16, parent_step)


def test_nothing_is_retired_while_nobody_came_later():
    assert superseded_by(100, FIRST, []) is None
    assert superseded_by(100, FIRST, [FIRST]) is None
    assert superseded_by(100, after(2, 5), [FIRST, after(2, 5)]) is None


def test_a_successor_retires_what_is_newer_than_the_step_it_continued_from():
    successor = after(2, 5)
    assert superseded_by(6, FIRST, [FIRST, successor]) == successor
    assert superseded_by(5, FIRST, [FIRST, successor]) is None
    assert superseded_by(4, FIRST, [FIRST, successor]) is None


def test_a_fresh_start_retires_everything_but_the_untrained_model():
    fresh = Incarnation(2, "c" * 16)
    assert superseded_by(1, FIRST, [fresh]) == fresh
    assert superseded_by(0, FIRST, [fresh]) is None


def test_a_predecessor_retires_nothing():
    assert superseded_by(50, after(3, 40), [FIRST, after(2, 10)]) is None


def test_a_grandchild_can_retire_what_the_child_left_standing():
    child, grandchild = after(2, 8), after(3, 4)
    assert superseded_by(7, FIRST, [child]) is None
    assert superseded_by(7, FIRST, [child, grandchild]) == grandchild
    assert superseded_by(9, child, [child, grandchild]) == grandchild


def test_incarnations_are_ordered_by_generation_and_differ_by_id():
    assert Incarnation(1, "f" * 16) < Incarnation(2, "0" * 16)
    drawn = {Incarnation.begin(1).id for _ in range(100)}
    assert len(drawn) == 100 and all(len(name) == 16 for name in drawn)


IDS = st.text("0123456789abcdef", min_size=16, max_size=16)
STEPS = st.integers(0, 10**10 - 1)


def test_shards_of_one_checkpoint_share_step_and_incarnation():
    assert ShardId(3, 0, 2, FIRST).checkpoint == ShardId(3, 1, 2, FIRST, persist=False).checkpoint
    assert ShardId(3, 0, 2, FIRST).checkpoint != ShardId(3, 0, 2, after(2, 2)).checkpoint


@given(STEPS, st.integers(0, 9), st.integers(1, 9), st.booleans(), IDS, STEPS)
def test_a_stamp_survives_json(step, rank, world, persist, name, parent_step):
    stamp = ShardId(step, rank, rank + world, Incarnation(world, name, name, parent_step), persist)
    assert ShardId.from_json(json.loads(json.dumps(stamp.to_json()))) == stamp


OTHER = ShardId(1, 0, 1, FIRST).to_json()["incarnation"]
WRONG = (
    {"step": "x"},
    {"step": -1},
    {"rank": 1},
    {"world": 0},
    {"step": float("inf")},
    {"step": True},
    {"step": 10**10},
)
WRONG += (
    {"world": 10**18},
    {"incarnation": OTHER | {"id": "../../elsewhere"}},
    {"incarnation": OTHER | {"parent": "x"}},
)


@pytest.mark.parametrize(
    "value", [None, [], {}, {"step": 1}, *({**ShardId(1, 0, 1, FIRST).to_json(), **w} for w in WRONG)]
)
def test_a_stamp_that_is_none_is_refused(value):
    with pytest.raises(FormatError):
        ShardId.from_json(value)
