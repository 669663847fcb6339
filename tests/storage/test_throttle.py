"""Tests the limits of a drain: bytes per second, and the priority of its threads."""

from __future__ import annotations

import itertools
import math
import os
import sys
import threading
import time

import pytest

from rekindle.common.priority import lower_priority
from rekindle.errors import UsageError
from rekindle.storage.throttle import Budget, parse_rate


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("500MB/s", 500_000_000),
        ("1.5GiB/s", 1_610_612_736),
        ("500 MB/s", 500_000_000),
        (" 2GB/s ", 2_000_000_000),
        ("1TB/s", 10**12),
        ("64KiB/s", 65_536),
        ("64kB/s", 64_000),
        ("64KB/s", 64_000),
        ("250M", 250_000_000),
        (".5MiB", 524_288),
        ("1000", 1000),
        ("1000B/s", 1000),
        (1000, 1000),
        (5e8, 500_000_000),
        (None, None),
    ],
)
def test_rates_that_people_write(text, expected):
    assert parse_rate(text) == expected


TEXTS = ["", "fast", "500Mb/s", "500mb/s", "-1MB/s", "1,5GB/s", "1 000MB/s", "MB/s", "1e9", "500MB/m", "1GB/s/s", "0"]
OTHERS = ["9" * 400, "0.4B/s", 0, -1, 0.5, math.inf, math.nan, True, b"1MB/s", [1]]


@pytest.mark.parametrize("nonsense", [*TEXTS, *OTHERS])
def test_what_is_no_rate_is_refused_with_an_example(nonsense):
    with pytest.raises(UsageError, match="'500MB/s'") as caught:
        parse_rate(nonsense)
    assert repr(nonsense) in str(caught.value)


class Clock:
    """A clock on which only what waits takes time. Writing takes none, as if the disk were infinitely fast."""

    def __init__(self) -> None:
        self.at = 1000.0

    def wait(self, seconds: float) -> None:
        self.at += seconds

    def budget(self, limit: int | None = None) -> Budget:
        return Budget(limit, now=lambda: self.at, wait=self.wait)

    def spend(self, budget: Budget, nbytes: int, most: int = 1 << 20) -> list[tuple[float, int]]:
        """(seconds, bytes so far) after each piece that the budget has let through."""
        began, done, seen = self.at, 0, []
        while done < nbytes:
            piece = min(budget.piece(most), nbytes - done)
            budget.take(piece)
            done += piece
            seen.append((self.at - began, done))
        return seen


@pytest.mark.parametrize("limit", [1_000_000, 40_000_000, 800_000_000])
def test_a_budget_is_kept_and_used(limit):
    clock = Clock()
    seen = clock.spend(clock.budget(limit), int(1.5 * limit))
    assert 1.4 < seen[-1][0] < 1.6
    # No moment shows more than the limit plus a moment's worth, and none is a long pause.
    assert max(done - limit * at for at, done in seen) <= 0.16 * limit
    assert max(b[0] - a[0] for a, b in itertools.pairwise(seen)) < 0.2


def test_by_the_real_clock_too():
    budget, began, done = Budget(10_000_000), time.monotonic(), 0
    while done < 3_000_000:
        done += (piece := budget.piece(1 << 20))
        budget.take(piece)
    assert time.monotonic() - began > 0.15


def test_an_idle_budget_saves_nothing_up():
    clock = Clock()
    budget = clock.budget(10_000_000)
    clock.spend(budget, 1_000_000)
    clock.wait(1.0)
    assert clock.spend(budget, 5_000_000)[-1][0] > 0.35


def test_pieces_are_whole_pages_however_low_the_limit():
    assert Budget(1).piece(1 << 20) == 4096
    assert Budget(1_000_001).piece(1 << 20) % 4096 == 0
    assert Budget(1_000_000_000).piece(1 << 20) == 1 << 20
    assert Budget().piece(1 << 20) == 1 << 20


def test_a_lifted_budget_lets_everybody_through_at_once():
    budget = Budget(1)
    budget.take(1000)  # the next one waits for 1000 s
    threading.Timer(0.2, budget.lift).start()
    began = time.monotonic()
    for _ in range(3):
        budget.take(1000)
    assert 0.1 < time.monotonic() - began < 100
    assert budget.piece(1 << 30) == 1 << 30


def test_a_limit_that_is_given_later_holds_from_then_on():
    clock = Clock()
    budget = clock.budget()
    assert clock.spend(budget, 1 << 30)[-1][0] == 0
    budget.limit = 10_000_000
    assert 0.4 < clock.spend(budget, 5_000_000)[-1][0] < 0.6


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="threads have a priority of their own on Linux")
def test_only_the_thread_that_steps_back_and_those_it_starts_make_way():
    def niceness() -> int:
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    found: list[int] = []

    def work() -> None:
        lower_priority()
        lower_priority()
        found.append(niceness())
        child = threading.Thread(target=lambda: found.append(niceness()))
        child.start()
        child.join()

    before = niceness()
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [max(10, before)] * 2
    assert niceness() == before
