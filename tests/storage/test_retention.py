"""Tests which checkpoints stay: by number, by multiples, and by age where nothing is set."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from rekindle.format.lineage import Incarnation, ShardId
from rekindle.format.metric import Metric
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


def kept_of(losses: dict[int, float | None], mode: str = "min", keep_best: bool = True) -> list[int]:
    """Steps that stay of those with these values, beside the newest."""
    metrics = {step: None if value is None else Metric("loss", value, mode) for step, value in losses.items()}
    stamps = [ShardId(step, 0, 1, START, metric=metric) for step, metric in metrics.items()]
    return sorted(stamp.step for stamp in surviving(stamps, 1, None, keep_best=keep_best))


def test_the_best_one_stays_besides():
    losses = {1: 0.5, 2: 0.25, 3: None, 4: 0.25, 5: 0.75, 6: None}
    assert kept_of(losses) == [2, 6] and kept_of(losses, "max") == [5, 6] and kept_of(losses, keep_best=False) == [6]
    assert kept_of({1: None, 2: None}) == [2] and kept_of({1: 2.0, 2: 1.0}) == [2]


def test_the_newest_metric_decides_which_one_is_the_best():
    stamps = [
        ShardId(1, 0, 1, START, metric=Metric("loss", 0.1, "min")),
        ShardId(2, 0, 1, START, metric=Metric("accuracy", 0.9, "max")),
        ShardId(3, 0, 1, START, metric=Metric("accuracy", 0.8, "max")),
        ShardId(4, 0, 1, START),
    ]
    assert [stamp.step for stamp in sorted(surviving(stamps, 1, None), key=lambda s: s.step)] == [2, 4]
    assert len(surviving(stamps, None, None)) == 4  # young ones stay by their age


@settings(max_examples=50)
@given(st.lists(st.none() | st.sampled_from([0.0, 0.5, 1.0]), min_size=1, max_size=40))
def test_the_best_of_all_is_there_however_often_it_was_pruned(values):
    there: dict[int, float | None] = {}
    for step, value in enumerate(values, 1):
        there = {kept: there.get(kept, value) for kept in kept_of({**there, step: value})}
        best = min((one for one in values[:step] if one is not None), default=None)
        assert best is None or best in there.values()


def test_a_metric_that_makes_no_sense_is_none():
    whole = ShardId(3, 0, 1, START, metric=Metric("val loss", 0.125, "min"))
    assert ShardId.from_json(whole.to_json()) == whole
    assert "metric" not in ShardId(3, 0, 1, START).to_json()
    for odd in (
        "loss",
        ["loss", 1.0],
        ["loss", "1", "min"],
        ["", 1.0, "min"],
        ["loss", 1.0, "best"],
        ["l" * 65, 1, "min"],
    ):
        assert ShardId.from_json({**whole.to_json(), "metric": odd}).metric is None, odd
    for number in (float("nan"), float("inf"), True, 10**400):
        assert ShardId.from_json({**whole.to_json(), "metric": ["loss", number, "min"]}).metric is None
    assert ShardId.from_json({**whole.to_json(), "later": {"a": 1}}) == whole  # as versions before this field read it
