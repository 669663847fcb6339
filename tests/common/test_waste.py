"""The interval with the least waste, against the truth: jobs with drawn faults, played through one by one."""

from __future__ import annotations

import math

import numpy as np
import pytest
from numpy.typing import NDArray

from rekindle.common.waste import best_interval, wasted_share
from rekindle.memory.history import ASSUMED, History

HOUR, DAY = 3600.0, 86400.0
GRID = np.geomspace(1 / 16, 16, 81)
"""Intervals that are tried beside the best one by calculation, in multiples of it."""


def play(faults: NDArray[np.float64], until: float, interval: float, cost: float, behind: float) -> float:
    """Plays a job through, fault by fault. Returns its wasted share: saves, and what is trained in vain.

    The time between a fault and the first new step is left out: a start begins at each fault, with a save there.
    """
    starts = np.concatenate(([0.0], faults))
    lengths = np.diff(np.concatenate((starts, [until])))
    struck = np.floor(np.maximum(0.0, lengths - behind) / interval)
    kept = struck * (interval - cost)  # what the last save that counts has of it
    kept[-1] = lengths[-1] * (1 - cost / interval)  # no fault ends it
    return float(1 - kept.sum() / until)


def draw(rng: np.random.Generator, between: float, until: float, shape: float = 1.0) -> NDArray[np.float64]:
    """Returns the times of faults. ``shape`` below 1: Weibull, they come in bursts, as those of clusters do."""
    count = int(until / between * 2 + 50)
    gaps = between / math.gamma(1 + 1 / shape) * rng.weibull(shape, count)
    times = np.cumsum(gaps)
    return times[times < until]


def test_the_share_is_what_drawn_faults_cost() -> None:
    rng = np.random.default_rng(1)
    for interval, cost, between, behind in ((600, 6, 5 * HOUR, 0), (3600, 60, 2 * HOUR, 90), (30, 0.1, DAY, 3)):
        until = 4000 * between
        found = play(draw(rng, between, until), until, interval, cost, behind)
        assert wasted_share(interval, cost, between, behind) == pytest.approx(found, rel=0.05)


@pytest.mark.parametrize("between", [600.0, HOUR, DAY, 30 * DAY])
@pytest.mark.parametrize("cost", [0.001, 0.1, 10.0, 100.0])
def test_no_interval_has_less_waste(cost: float, between: float) -> None:
    best = best_interval(cost, between)
    least = min(wasted_share(best * times, cost, between) for times in GRID)
    assert wasted_share(best, cost, between) <= least * 1.0001


def test_limits() -> None:
    assert best_interval(0.0, HOUR) == 0.0 and math.isinf(best_interval(1.0, math.inf))
    assert best_interval(HOUR, 100.0) == HOUR + 100, "saves that take longer than a job lives"
    assert wasted_share(10.0, 1.0, math.inf) == 0.1 and wasted_share(1.0, 2.0, HOUR) == 1.0
    assert wasted_share(1e9, 1.0, 1.0) == 1.0


@pytest.mark.parametrize(
    ("cost", "behind", "between", "shape"),
    [(0.02, 0.0, 3 * HOUR, 1.0), (3.0, 20.0, 12 * HOUR, 1.0), (0.02, 0.0, 12 * HOUR, 1.0), (3.0, 20.0, 12 * HOUR, 0.7)],
)
def test_1000_jobs_waste_at_most_two_percent_more_than_at_the_best_interval(
    cost: float, behind: float, between: float, shape: float
) -> None:
    """Each job chooses by a past of its own, of a month, and is struck by other faults in the next one.

    With a shape of 0.7 they come in bursts, though the calculation takes their rate to be constant.
    """
    rng = np.random.default_rng(2)
    month, chosen, others = 30 * DAY, 0.0, np.zeros(len(GRID))
    true = best_interval(cost, between)
    for _ in range(1000):
        past = len(draw(rng, between, month, shape))
        interval = best_interval(cost, History(month, past, past, past, 0.0).between(past))
        faults = draw(rng, between, month, shape)
        chosen += play(faults, month, interval, cost, behind)
        others += [play(faults, month, true * times, cost, behind) for times in GRID]
    # Waste of which no interval knows, of writes that are under way, counts against neither.
    none = 1000 * behind / between
    more = (chosen - none) / (others.min() - none) - 1
    print(f"a fault each {between / HOUR:g} h, shape {shape:g}; saves of {cost:g} s: {100 * more:.2f} % more waste")
    assert more <= 0.02, (chosen / 1000, others / 1000)


def test_a_job_without_a_past_is_saved_as_if_a_fault_came_each_day() -> None:
    assert History(0.0, 0, 0, 0, 0.0).between(0) == ASSUMED == DAY
    rare = History(30 * DAY, 0, 0, 0, 0.0).between(0)
    assert rare == 31 * DAY
    assert History(10 * DAY, 4, 4, 0, 0.0).between(4) == 11 * DAY / 5
