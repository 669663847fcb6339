"""Snapshots at fixed times: kept within one step whatever the steps take, and the same steps on all ranks."""

from __future__ import annotations

import itertools
import logging
import math
import random
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch.distributed as dist

import rekindle
from rekindle.save.cadence import agreement
from rekindle.save.schedule import DirectSaveLimit
from rekindle.save.step_clock import StepClock
from rekindle.save.timed import Timed
from rekindle.session.group import this_group
from tests.fork_server import context


class Ranks:
    """Ranks of one job on clocks of their own. A rank ends a step a little earlier or later than the others."""

    def __init__(self, world: int, seconds: float, seed: int = 0) -> None:
        self.random = random.Random(seed)
        self.now, self.step, self.longest, self.asked = 0.0, 0, 0.0, 0
        self.saved: list[tuple[int, float]] = []
        self._votes: list[list[float]] = [[] for _ in range(world)]
        self._clocks = [(self.random.uniform(-1e6, 1e6), 1 + self.random.uniform(-1e-4, 1e-4)) for _ in range(world)]
        self._late = [0.0] * world
        self.direct: list[list[float]] = [[] for _ in range(world)]
        """Times at which each rank would write a save straight to storage, where that is limited."""
        self.limits = [DirectSaveLimit(30.0, world, lambda: 1.0, self._clock(rank)) for rank in range(world)]
        self.clocks = [StepClock(self._clock(rank)) for rank in range(world)]
        self.ranks = [Timed(seconds, world, self._agree(rank), clock) for rank, clock in enumerate(self.clocks)]

    def _clock(self, rank: int) -> Callable[[], float]:
        zero, speed = self._clocks[rank]
        return lambda: zero + speed * (self.now + self._late[rank])

    def _agree(self, rank: int) -> Callable[[float], Callable[[], float]]:
        def ask(number: float) -> Callable[[], float]:
            votes = self._votes[rank]
            votes.append(number)
            self.asked = max(self.asked, len(votes))
            place = len(votes) - 1

            def answer() -> float:
                assert all(len(each) > place for each in self._votes), "a rank would wait for one that does not ask"
                return max(each[place] for each in self._votes)

            return answer

        return ask

    def run(self, steps: int, draw: Callable[[], float]) -> None:
        for _ in range(steps):
            took = draw()
            self.step, self.now, self.longest = self.step + 1, self.now + took, max(self.longest, took)
            self._late = [self.random.uniform(0, 0.2) * min(took, 1.0) for _ in self.ranks]
            order = self.random.sample(range(len(self.ranks)), len(self.ranks))
            for clock in self.clocks:
                clock.tick()
            due = {rank: self.ranks[rank].due(self.step) for rank in order}
            assert len(set(due.values())) == 1, f"step {self.step}: {due}"
            if due[0]:
                self.saved.append((self.step, self.now))
                for rank, limit in enumerate(self.limits):
                    if limit.due(self.ranks[rank].number):
                        limit.saved(self.ranks[rank].number)
                        self.direct[rank].append(self.now)


@pytest.mark.parametrize("world", [1, 2, 8])
@pytest.mark.parametrize("seconds", [1.3, 7.3, 30.0, 600.0])
def test_the_times_are_kept_within_one_step_under_jitter(world: int, seconds: float) -> None:
    ranks = Ranks(world, seconds, seed=world)
    ranks.run(6_000, lambda: ranks.random.uniform(0.5, 1.5) * 0.4)
    first = ranks.saved[0][1]
    assert ranks.saved[0][0] == 1 and len(ranks.saved) == pytest.approx(ranks.now / seconds, rel=0.01, abs=2)
    off = [at - (first + number * seconds) for number, (_, at) in enumerate(ranks.saved)]
    assert max(map(abs, off)) <= ranks.longest + 2e-4 * ranks.now, max(map(abs, off))
    questions = math.log2(seconds / 0.4) + 3  # for each snapshot
    assert ranks.asked <= (questions * len(ranks.saved) if world > 1 else 0)


@pytest.mark.parametrize("seconds", [3.0, 20.0, 31.0, 100.0])
def test_without_memory_all_ranks_bring_the_same_of_these_steps_to_storage(seconds: float) -> None:
    ranks = Ranks(3, seconds)
    ranks.run(5_000, lambda: ranks.random.uniform(0.5, 1.5) * 0.4)
    assert ranks.direct[0] == ranks.direct[1] == ranks.direct[2]
    gaps = [later - at for at, later in itertools.pairwise(ranks.direct[0])]
    assert min(gaps) >= 15 and max(gaps) <= max(seconds, 60) + 2 * seconds, gaps


def test_steps_of_other_lengths_are_followed() -> None:
    ranks = Ranks(4, 10.0)
    ranks.run(3, lambda: 20.0)  # it compiles
    for pace in (0.1, 1.0, 0.3, 4.0, 0.01):
        began, longest = ranks.now, pace * 1.3
        ranks.run(round(200 / pace), lambda pace=pace: pace * ranks.random.uniform(0.7, 1.3))  # type: ignore[misc]
        times = [at for _, at in ranks.saved if at > began + 20]
        gaps = [later - at for at, later in itertools.pairwise(times)]
        assert gaps and max(abs(gap - 10.0) for gap in gaps) <= 2 * longest, (pace, gaps)


def test_after_a_long_pause_nothing_is_made_up_for() -> None:
    ranks = Ranks(2, 10.0)
    ranks.run(100, lambda: 1.0)
    before = len(ranks.saved)
    ranks.run(1, lambda: 3600.0)
    ranks.run(25, lambda: 1.0)
    assert 2 <= len(ranks.saved) - before <= 4, ranks.saved[before:]


def _train(rank: int, rendezvous: str, queue: object) -> None:
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=3)
    clock, draw, at = StepClock(), random.Random(rank), []
    timed = Timed(0.1, 3, agreement(this_group()), clock)
    for step in range(1, 151):
        threading.Event().wait(draw.uniform(0.0, 0.01))
        dist.barrier()  # a step ends on no rank before all have done their part
        clock.tick()
        if timed.due(step):
            at.append(step)
    queue.put(at)
    dist.barrier()


@pytest.mark.campaign(seconds=12)
def test_real_ranks_choose_the_same_steps(tmp_path: Path) -> None:
    queue = context.Queue()
    ranks = [context.Process(target=_train, args=(rank, str(tmp_path / "rendezvous"), queue)) for rank in range(3)]
    for process in ranks:
        process.start()
    found = [queue.get(timeout=60) for _ in ranks]
    for process in ranks:
        process.join(60)
    assert found[0] == found[1] == found[2] and found[0][0] == 1 and 3 <= len(found[0]) < 75, found


def test_ranks_that_cannot_agree_save_every_step_and_say_so(caplog: pytest.LogCaptureFixture) -> None:
    clock, due = StepClock(iter(range(1000)).__next__), []
    rank = Timed(100.0, 2, lambda mine: lambda: math.nan, clock)
    with caplog.at_level(logging.WARNING, "rekindle"):
        for n in range(1, 8):
            clock.tick()
            due.append(rank.due(n))
    assert due == [True, False, *[True] * 5]
    assert len(caplog.records) == 1 and "every step has a snapshot from now on" in caplog.text


def test_a_job_that_saves_by_the_clock(root: Path, memory: Path) -> None:
    with rekindle.Checkpointer(root, {"values": rekindle.Values(x=0)}, snapshot_every="1h", persist_every="2h") as ckpt:
        ckpt.restore()
        for step in range(1, 50):
            ckpt.step(step)
        assert ckpt.metrics.saves == 1
        ckpt.save(50)
