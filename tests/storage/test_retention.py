"""Tests which checkpoints stay: by number, by multiples, and by age where nothing is set."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from rekindle.format.lineage import Incarnation, ShardId
from rekindle.storage.retention import MOST_BY_DEFAULT, surviving

START = Incarnation(1, "a" * 16)
GAPS = st.lists(st.integers(1, 5000) | st.just(1) | st.just(1000), min_size=1, max_size=150)


def kept(steps: list[int], keep: int | None = None, keep_every: int | None = None) -> list[int]:
    return sorted(s.step for s in surviving([ShardId(step, 0, 1, START) for step in steps], keep, keep_every))


def histories(gaps: list[int]) -> list[tuple[int, list[int], list[int]]]:
    """(newest, all that there have been, what is left) after each checkpoint, each pruned on top of the one before."""
    found, there, ever, now = [], [], [], 0
    for gap in gaps:
        now += gap
        ever.append(now)
        there = kept([*there, now])
        found.append((now, list(ever), there))
    return found


def apart(one: int, other: int) -> float:
    return max(one, other) / max(min(one, other), 1)


def test_numbers_and_multiples_are_as_they_were_asked_for():
    assert kept([1, 2, 3, 4, 5], keep=2) == [4, 5]
    assert kept(list(range(1, 41)), keep=1, keep_every=10) == [10, 20, 30, 40]
    assert kept([8, 10, 15, 17], keep_every=10) == [10, 15, 17]
    assert kept([7], keep=0) == [7] and kept([], keep=2) == kept([]) == []


def test_without_a_word_there_is_something_to_go_back_to():
    assert histories([100] * 40)[-1][2] == [100, 2500, 3100, 3700, 3800, 3900, 4000]


@settings(max_examples=200)
@given(GAPS)
def test_every_age_that_there_was_has_something_near_it(gaps):
    for newest, ever, there in histories(gaps):
        assert set(ever[-2:]) <= set(there) <= set(ever) and len(there) <= MOST_BY_DEFAULT
        rungs = {(newest - step).bit_length() for step in ever}
        if len(rungs) <= MOST_BY_DEFAULT - 2:  # else the bound has made it thinner
            for step in ever:
                ages = [max(newest - other, 1) for other in there]
                assert min(apart(max(newest - step, 1), age) for age in ages) <= 4, (newest, step, there)


@given(GAPS)
def test_pruning_again_takes_nothing_more(gaps):
    for _, _, there in histories(gaps):
        assert kept(there) == there


def test_a_long_run_is_not_thinned_out_to_nothing():
    for newest, _, there in histories([30] * 4000)[100::50]:
        ages = sorted(newest - step for step in there)[1:]
        assert len(there) >= 6 and all(apart(*pair) <= 16 for pair in pairwise(ages)), ages
