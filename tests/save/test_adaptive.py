"""Snapshots as often as a budget pays for: from the first step on, while training changes, at the same steps."""

from __future__ import annotations

import itertools
import logging
import math
import random
from collections.abc import Callable

import pytest

from rekindle.save.adaptive import Adaptive
from rekindle.save.snapshot_price import SnapshotPrice
from rekindle.save.step_lengths import Load, Step

BUDGET = 0.01


class Ranks:
    """Ranks of one job. Each has its own measure of the same steps; those of ``behind`` learn of it steps later."""

    def __init__(
        self, base: float, cost: float, world: int = 1, *, copying: float | None = None, small: bool = False
    ) -> None:
        self.base, self.cost, self.copying = base, cost, copying
        self.random = random.Random(0)
        self.noise, self.behind, self.nbytes = 0.0, 0, 10**9
        self.seen = 0.0
        """Share of the cost during which the host is seen to stand still."""
        self.small = [small] * world
        self.not_ready: list[int] = [0] * world
        """Steps until which a rank has no memory."""
        self.share = [1.0] * world
        """Share of the cost that a rank measures."""
        self.gone = False
        self.step, self.now = 0, 0.0
        self.saved: list[int] = []
        self.spent = 0.0
        self._votes: list[list[float]] = [[] for _ in range(world)]
        self._late: list[list[Step]] = [[] for _ in range(world)]
        self._had = [False] * world
        self._left = [False] * world
        self._due = False
        self.ranks = [self._rank(rank, small) for rank in range(world)]

    def _rank(self, rank: int, small: bool) -> Adaptive:
        is_small = lambda: self.small[rank]  # noqa: E731
        world = len(self.small)
        return Adaptive(BUDGET, world, self._agree(rank), SnapshotPrice(), is_small, small=small, reports=rank == 0)

    def _agree(self, rank: int) -> Callable[[float], Callable[[], float]]:
        def ask(number: float) -> Callable[[], float]:
            votes = self._votes[rank]
            votes.append(number)
            place = len(votes) - 1

            def answer() -> float:
                if self.gone:
                    return math.nan
                assert all(len(each) > place for each in self._votes), "a rank would wait for one that does not ask"
                return max(each[place] for each in self._votes)

            return answer

        return ask

    @property
    def questions(self) -> int:
        return len(self._votes[0])

    @property
    def every(self) -> int:
        return self.ranks[0].every

    def run(self, steps: int) -> list[int]:
        """Returns the steps among the next so many that had a snapshot on all ranks."""
        self.saved, self.spent, began = [], 0.0, self.now
        for _ in range(steps):
            self.step += 1
            took = self.base * (1 + self.random.uniform(-self.noise, self.noise)) + self.cost * any(self._had)
            self.spent += self.cost * any(self._had)
            self.now += took
            due = [self._end(rank, took) for rank in self.random.sample(range(len(self.ranks)), len(self.ranks))]
            assert len(set(due)) == 1, f"step {self.step}: the ranks don't do alike"
            self._due = due[0]
            self._left = [self._due and self.step < ready for ready in self.not_ready]
            self._had = [self._due and not left for left in self._left]
            if all(self._had):
                self.saved.append(self.step)
        self.took = self.now - began
        return self.saved

    def _end(self, rank: int, took: float) -> bool:
        cost = self.cost * self.share[rank]
        load = Load(self.seen * cost, self.copying or cost, self.nbytes) if self._had[rank] else None
        known = self._late[rank]
        known.append(Step(self.step, took - self.cost * (1 - self.share[rank]) * any(self._had), load))
        while len(known) > self.behind:
            step = known.pop(0)
            if step.number > 1:  # nobody has seen the first one begin
                self.ranks[rank].measured(step)
        return self.ranks[rank].due(self.step, missed=self._left[rank])


@pytest.mark.parametrize("world", [1, 3])
@pytest.mark.parametrize(
    ("base", "cost"),
    [
        *((0.06, 0.03), (0.06, 0.115), (1.0, 0.015), (20.0, 5.0)),
        pytest.param(0.004, 0.4, marks=pytest.mark.campaign(seconds=6)),
    ],
)
def test_the_budget_holds_from_the_first_second_on(base: float, cost: float, world: int) -> None:
    """Each snapshot has been paid for when the next one comes; the first one is there after the first step."""
    job = Ranks(base, cost, world, copying=cost)
    every = math.ceil(cost / (BUDGET * base) - 1e-7)
    saved = job.run(max(3 * every, 40) + 3)
    assert saved[0] == 1
    assert all(later - at >= every for at, later in itertools.pairwise(saved)), saved
    assert saved[1] <= max(every, 6) + 1, "nothing else holds it up"
    assert job.every == every
    job.run(20 * every)
    assert 19 <= len(job.saved) <= 21 and job.spent <= BUDGET * 20 * every * base * 1.06


@pytest.mark.parametrize("world", [1, 2])
def test_a_copy_behind_training_costs_little_and_comes_often(world: int) -> None:
    """While nothing can be compared, the price is the time that the copy took. Then it is what steps are longer."""
    job = Ranks(0.5, 0.002, world, copying=0.2)
    saved = job.run(60)
    assert saved[:2] == [1, 1 + math.ceil(0.2 / (BUDGET * 0.5))]
    assert len(saved) >= 10 and job.every == 1
    assert len(job.run(320)) == 310, "each 32nd is a probe"


@pytest.mark.parametrize("seed", range(20))
def test_noise_alone_leaves_the_interval_short(seed: int, caplog: pytest.LogCaptureFixture) -> None:
    """Steps vary by 30 %, and a snapshot costs nothing. One compared step could ask for 60."""
    job = Ranks(1.0, 0.0, copying=0.9)
    job.noise, job.random = 0.3, random.Random(seed)
    with caplog.at_level(logging.INFO, "rekindle"):
        job.run(250)  # the first three or four snapshots
        assert job.every <= 40
        job.run(1000)
        assert job.every <= 18
        assert len(job.run(2000)) > 2000 / 15
    assert len(caplog.records) <= 8


@pytest.mark.parametrize("seed", range(5))
def test_the_budget_holds_amid_noise_too(seed: int) -> None:
    job = Ranks(0.1, 0.08, 2, copying=0.1)
    job.noise, job.random = 0.3, random.Random(seed)
    saved = [*job.run(160)]
    assert len(saved) * 0.08 <= 0.015 * 16 + 0.08 and saved[0] == 1
    job.run(8000)
    assert 0.004 < job.spent / (8000 * 0.1) <= 0.012


def test_one_long_step_is_no_price() -> None:
    """An evaluation of a minute comes with the only snapshot that can be compared: the copy took far less."""
    job = Ranks(0.1, 0.05)
    job.run(6)
    job.run(60 - 6)
    found = job.run(1)
    while not found:
        found = job.run(1)
    job.base, before = 60.0, job.every
    job.run(1)
    job.base = 0.1
    job.run(3)
    assert before == 50 and job.every <= 60


@pytest.mark.parametrize("world", [1, 2])
def test_steps_that_become_longer_or_shorter_are_followed(world: int) -> None:
    job = Ranks(0.1, 0.5, world)
    job.run(3000)
    assert job.every == 500
    job.base = 1.0
    job.run(130)
    assert job.every == 50, "it does not wait for the long interval to end"
    assert len(job.run(500)) == 10
    job.base = 0.1
    job.run(300)
    assert job.every == 500


def test_a_state_that_grows_is_dearer_at_once() -> None:
    job = Ranks(0.1, 0.05, 2)
    job.run(2000)
    assert job.every == 50
    job.cost, job.nbytes = 0.5, 10**10
    job.run(50 + 10)
    assert job.every == 500, "one snapshot has told"


def test_a_snapshot_that_becomes_dearer_is_followed_too() -> None:
    job = Ranks(0.1, 0.05, 2)
    job.run(2000)
    job.cost = 0.5  # as where others use the bus
    job.run(4 * 50 + 10)
    assert job.every == 500
    job.cost = 0.05
    job.run(500 * 3)
    assert job.every == 50


def test_the_slowest_rank_decides() -> None:
    job = Ranks(1.0, 0.2, 3)
    job.share = [0.1, 1.0, 0.5]
    job.run(100)
    assert [rank.every for rank in job.ranks] == [20, 20, 20]


def test_what_training_stands_still_for_is_the_least_price() -> None:
    """The step that carried it happened to be short."""
    price = SnapshotPrice()
    for number in range(2, 11):
        price.add(Step(number, 1.0, None))
    price.add(Step(11, 0.9, Load(0.2, 0.3, 1)))
    assert price.known() == (0.2, 1.0)


@pytest.mark.parametrize("world", [1, 2])
def test_a_device_behind_the_host_is_heard_of_later(world: int) -> None:
    job = Ranks(0.06, 0.03, world)
    job.behind = 12
    saved = job.run(120)
    assert saved[:2] == [1, 51] and job.every == 50


def test_ranks_ask_each_other_rarely() -> None:
    job = Ranks(0.1, 0.5, 2)
    job.run(1000)
    asked = job.questions
    job.run(10_000)
    assert job.questions - asked <= 10_000 / 100 + 2 * 10_000 / 500


# -- small states ---------------------------------------------------------------------------------------------------


def test_small_snapshots_come_with_every_step() -> None:
    job = Ranks(0.01, 0.004, 2, small=True)
    assert job.run(300) == list(range(1, 301)), "without probes"
    assert job.every == 1 and job.questions < 30


def test_one_rank_outgrows_it_and_all_adapt() -> None:
    job = Ranks(0.01, 0.004, 2, small=True)
    job.run(1000)
    job.small = [True, False]
    job.run(200)
    assert job.every == 40
    assert len(job.run(400)) == 10
    job.small = [True, True]
    job.run(110)
    assert job.run(50) == list(range(job.step - 49, job.step + 1))


# -- memory that is not ready ---------------------------------------------------------------------------------------


def test_a_rank_alone_tries_at_each_step_while_memory_is_made() -> None:
    job = Ranks(0.1, 0.05)
    job.not_ready = [30]
    assert job.run(79) == [30]
    assert job.run(1) == [80]


def test_ranks_try_again_soon() -> None:
    job = Ranks(0.1, 0.05, 2)
    job.not_ready = [3, 12]
    assert 12 <= job.run(40)[0] <= 1.5 * 12 + 3


def test_ranks_try_again_together_and_few_snapshots_are_in_vain() -> None:
    job = Ranks(0.1, 0.05, 3)
    job.not_ready = [3, 40, 20]
    saved, first = job.run(61), 40
    assert len(saved) == 1 and first <= saved[0] <= 1.5 * first + 3
    assert job.ranks[0].number <= 12
    job.run(300)
    assert job.every == 50


# -- the end of agreement -------------------------------------------------------------------------------------------


def test_ranks_that_cannot_agree_share_steps_and_keep_the_budget(caplog: pytest.LogCaptureFixture) -> None:
    job = Ranks(0.1, 0.05, 2)
    job.share = [1.0, 0.5]
    job.run(1000)
    job.gone = True
    ranks, due = job.ranks, [list[int](), list[int]()]
    for n in range(1001, 2001):
        for rank, cadence in enumerate(ranks):
            if cadence.due(n):
                due[rank].append(n)
    after = [[n for n in each if n > 1200] for each in due]
    assert [cadence.every for cadence in ranks] == [64, 32]
    assert (set(after[0]) < set(after[1]) and len(after[0]) == 13) or len(after[0]) == 12
    (warning,) = [record.message for record in caplog.records if "can't agree any more" in record.message]
    assert "rank 0 every 64 steps. Up to so many are lost" in warning


def test_the_log_goes_on_saying_the_interval_when_ranks_cannot_agree(caplog: pytest.LogCaptureFixture) -> None:
    job = Ranks(0.1, 0.05, 2)
    job.run(1000)
    job.gone = True
    with caplog.at_level(logging.INFO, "rekindle"):
        job.run(200)
        assert "from now on: on rank 0" not in caplog.text, "it is still the same"
        job.cost = 0.4
        job.run(1000)
        assert f"snapshots every {job.every} steps" in caplog.records[-1].message and job.every > 64
        job.cost = 0.05
        job.run(4000)
    assert f"snapshots every {job.every} steps" in caplog.records[-1].message and job.every == 64
    assert len(caplog.records) < 8, "the log isn't full of it"


# -- words ----------------------------------------------------------------------------------------------------------


def test_the_log_says_the_interval_and_what_is_lost(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "rekindle"):
        job = Ranks(0.5, 0.05, 2)
        job.run(2000)
    (record,) = caplog.records
    assert "snapshots every 10 steps, 5s from now on" in record.message
    assert "Up to 10 step(s) are lost if all ranks die at once" in record.message
