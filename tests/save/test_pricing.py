"""The time that snapshots and drains take from training, measured beside each other."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from rekindle.memory.job_dir import JobDir
from rekindle.memory.prices import Prices, read_prices, write_prices
from rekindle.save.pricing import Pricing
from rekindle.save.step_clock import StepClock
from rekindle.save.step_lengths import Load, StepLengths
from tests.stored import job_in

START = "a" * 16


class Job:
    """A job on a clock of its own: a snapshot makes a step longer, and so does a drain beside it."""

    def __init__(self, job: JobDir, every: int, step: float = 0.5, snapshot: float = 0.1, share: float = 0.3) -> None:
        self.now, self.job, self.every = 1000.0, job, every
        self.step, self.snapshot, self.share = step, snapshot, share
        self.clock = StepClock(lambda: self.now)
        self.pricing = Pricing(job, START, self.clock)
        self.lengths = StepLengths(self.clock)
        self.load: Load | None = None
        self.count = 0

    def run(self, steps: int, drain: tuple[float, float] | None = None) -> None:
        """``drain``: begin and end of one that is under way."""
        for _ in range(steps):
            beside = drain is not None and drain[0] <= self.now < drain[1]
            took = self.step + (self.snapshot if self.load is not None else 0.0) + (self.share * self.step) * beside
            self.now, self.count = self.now + took, self.count + 1
            self.clock.tick()
            self.pricing.stepped(self.lengths.stepped(self.load))
            self.load = Load(0.02, 0.2, 1000) if self.count % self.every == 0 else None

    def drain(self, seconds: float) -> None:
        began = self.now
        self.run(round(seconds / self.step), (began, began + seconds))
        self.job.notes.write_last_drain(began, seconds)
        self.run(40)


@pytest.fixture
def job(memory: Path, root: Path) -> JobDir:
    return job_in(memory, root)


def test_a_snapshot_costs_what_its_steps_are_longer(job: JobDir) -> None:
    training = Job(job, every=4)
    training.run(200)
    found = read_prices(job, START)
    assert found is not None and found.step == pytest.approx(0.5) and found.snapshot == pytest.approx(0.1)
    assert found.snapshot_gap == pytest.approx(4 * 0.5 + 0.1) and found.drain is found.drain_cost is None
    assert read_prices(job, "b" * 16) is None, "that is another start's"


def test_where_all_steps_have_one_only_the_stall_is_known(job: JobDir) -> None:
    training = Job(job, every=1)
    training.run(50)
    found = training.pricing.prices()
    assert found is not None and found.step == pytest.approx(0.6) and found.snapshot == 0.02


def test_a_drain_costs_what_the_steps_beside_it_are_longer(job: JobDir) -> None:
    training = Job(job, every=1000)
    training.run(100)
    for _ in range(3):
        training.drain(10.0)
    found = read_prices(job, START)
    assert found is not None and found.drain == pytest.approx(10.0, abs=1e-3)
    assert found.drain_cost == pytest.approx(16 * 0.15, rel=0.2)  # 10 s have 16 longer steps
    assert found.drain_gap is not None and found.drain_gap > 10


def test_one_pause_is_no_price(job: JobDir) -> None:
    training = Job(job, every=4)
    training.run(100)
    training.step = 300.0  # an evaluation
    training.run(1)
    training.step = 0.5
    training.run(30)
    found = training.pricing.prices()
    assert found is not None and found.snapshot == pytest.approx(0.1) and found.step == pytest.approx(0.5)


def test_too_few_steps_tell_nothing(job: JobDir) -> None:
    training = Job(job, every=4)
    training.run(5)
    assert training.pricing.prices() is None


@pytest.mark.parametrize(
    "damaged", ["", "{}", '{"start": "' + START + '", "prices": {"step": -1, "snapshot": 0}}', '{"start": 5}', "[1]"]
)
def test_a_damaged_record_is_none(job: JobDir, damaged: str) -> None:
    (job.path / "prices.json").write_text(damaged)
    assert read_prices(job, START) is None


def test_what_is_written_is_read(job: JobDir) -> None:
    for known in itertools.product((None, 2.5), repeat=4):
        prices = Prices(0.25, 0.125, *known)
        write_prices(job, START, prices)
        assert read_prices(job, START) == prices
