"""Silence is judged on a clock that the test turns: what excuses it, and for how long."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest

from rekindle.agent.beat import Page, fault_to_json
from rekindle.agent.hang import Excuses, HangWatch
from rekindle.agent.others import Others
from rekindle.memory.job_dir import JobDir
from rekindle.memory.status import STABLE, TRAINING, Status
from rekindle.peers.wire import MAX_MESSAGE

_TICK = 0.25
_BEGIN = 1000.0


class Clock(Others):
    """Two nodes, whose ranks made their last progress at a time; what else happens the test says for each moment."""

    name, patience = "n0", 10.0
    ranks = 2

    def __init__(self, place: Path, floor: float) -> None:
        self.watch = HangWatch(JobDir(place))
        self.now, self.progress, self.unsettled, self.floor = _BEGIN, _BEGIN, -math.inf, floor

    def pages(self) -> dict[int, Page]:
        at = int(self.progress * 1e9)
        return {
            rank: Page(Status(1, 1, STABLE, TRAINING, 0, 7, 7, -1, 0.02, at, "", 0.0), self.floor, False)
            for rank in range(self.ranks)
        }

    def unsettled_at(self) -> float:
        return self.unsettled

    def sleep(self, seconds: float) -> None:
        self.watch.slept(self.now, self.now + seconds)
        self.now += seconds

    def noticed(self, within: float, happens: Callable[[float], object] = lambda passed: None) -> float | None:
        """The seconds without progress after which the hang is noticed; None if it isn't in so many.

        ``happens`` is called at each look, with the seconds that have passed.
        """
        while self.now < _BEGIN + within:
            self.now += _TICK
            happens(self.now - _BEGIN)
            if self.watch.check(self.now, {}, self) is not None:
                return self.now - self.progress
        return None


@pytest.fixture
def clock(tmp_path: Path) -> Clock:
    return Clock(tmp_path, 60.0)


def test_the_account_of_a_hang_of_many_ranks_can_be_told_to_other_nodes(clock: Clock) -> None:
    clock.ranks = 16_384
    fault = clock.watch.check(clock.now + 61.0, {}, clock)
    while fault is None:
        clock.now += _TICK
        fault = clock.watch.check(clock.now + 61.0, {}, clock)
    assert len(json.dumps(fault_to_json(fault))) < MAX_MESSAGE / 4
    assert fault.what.startswith("ranks 0, 1, 2, ") and fault.what.endswith(
        "98, 99 and 16284 more hang after step 7, before its next update"
    )
    assert fault.detail.count("rank 5: after") == 1 and "and 16284 more that are further on" in fault.detail


def test_a_hang_is_noticed_after_a_minute(clock: Clock) -> None:
    assert clock.noticed(70.0) == pytest.approx(61.0, abs=1.0)


@pytest.mark.parametrize("every", [5.0, 40.0])
def test_looks_that_are_late_again_and_again_put_a_hang_off_by_their_own_time(clock: Clock, every: float) -> None:
    slept = 0.0

    def happens(passed: float) -> None:
        nonlocal slept
        if passed % every < _TICK:
            clock.sleep(2.0)
            slept += 2.0

    found = clock.noticed(600.0, happens)
    assert found is not None and found == pytest.approx(61.0 + slept, abs=2.5)


def test_nodes_that_are_silent_again_and_again_put_a_hang_off_by_that_time(clock: Clock) -> None:
    def happens(passed: float) -> None:
        if passed % 40.0 < 3.0:
            clock.unsettled = clock.now

    found = clock.noticed(600.0, happens)
    assert found is not None and 63.0 < found < 75.0, "two times of 3 s, and the second before each"


def test_a_node_that_comes_and_goes_hides_no_hang_for_ever(clock: Clock) -> None:
    def happens(passed: float) -> None:
        clock.unsettled = clock.now

    found = clock.noticed(600.0, happens)
    assert found == pytest.approx(61.0 + 6 * clock.patience, abs=1.5)


def test_a_node_that_stood_still_is_no_hang_once_it_goes_on(tmp_path: Path) -> None:
    clock = Clock(tmp_path, 0.0)  # the limit is little more than a second
    clock.now += 0.5
    assert clock.watch.check(clock.now, {}, clock) is None
    clock.sleep(30.0)
    assert clock.watch.check(clock.now, {}, clock) is None
    clock.now += 0.25
    clock.progress = clock.now
    assert clock.noticed(40.0) == pytest.approx(1.25, abs=0.3)


def test_what_is_excused_twice_counts_once() -> None:
    excuses = Excuses()
    excuses.add(10.0, 15.0, doubt=False)
    excuses.add(14.0, 18.0, doubt=True)
    excuses.add(17.0, 19.0, doubt=True)
    excuses.add(12.0, 13.0, doubt=True)
    assert excuses.seconds(0.0, 60.0) == 9.0 and excuses.seconds(16.0, 60.0) == 3.0
    assert excuses.seconds(0.0, 1.0) == 6.0 and excuses.seconds(14.0, 2.0) == 3.0
