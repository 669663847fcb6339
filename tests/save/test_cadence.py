"""How often a snapshot is taken: the smallest interval that a budget allows, the same on all ranks."""

from __future__ import annotations

import logging
import math
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

import rekindle
from rekindle.common.durations import describe_seconds
from rekindle.common.waste import best_interval
from rekindle.memory.incidents import write_incident
from rekindle.save.cadence import Auto, Fixed, agreement
from rekindle.save.start import _between_faults
from rekindle.save.step_clock import StepClock
from tests.fork_server import context
from tests.memory.test_incident import some
from tests.stored import job_in


class Job:
    """A job on a clock of its own: steps of ``base`` seconds, and ``cost`` more after a snapshot."""

    def __init__(
        self, base: float, cost: float, budget: float = 0.01, others: float = 0.0, between: float | None = None
    ) -> None:
        self.base, self.cost, self.now, self.step = base, cost, 0.0, 0
        self.saved: list[int] = []
        self.clock = StepClock(lambda: self.now)
        self.cadence = Auto(budget, lambda mine: lambda: max(mine, others), self.clock, between_faults=between)

    def run(self, steps: int) -> list[int]:
        """The steps among the next so many that had a snapshot."""
        self.saved = []
        stall = None
        for _ in range(steps):
            self.step += 1
            self.now += self.base + (self.cost if stall is not None else 0.0)
            self.clock.tick()
            stall = self.cost / 10 if self.cadence.due(self.step, stall) else None
            if stall is not None:
                self.saved.append(self.step)
        return self.saved


def test_fixed() -> None:
    assert [n for n in range(1, 13) if Fixed(4).due(n, None)] == [4, 8, 12]


@pytest.mark.parametrize(
    ("base", "cost", "budget", "every"),
    [(1.0, 0.0099, 0.01, 1), (1.0, 0.03, 0.01, 3), (0.2, 0.1, 0.01, 50), (0.2, 0.1, 0.05, 10), (1.0, 0.0, 0.01, 1)],
)
def test_the_smallest_interval_within_the_budget(base: float, cost: float, budget: float, every: int) -> None:
    job = Job(base, cost, budget)
    job.run(40)
    assert job.cadence.every == every
    job.run(1000)
    assert job.cadence.every == every
    saved = len(job.run(3200))
    assert saved == pytest.approx(3200 / every, rel=0.04)
    assert saved * cost <= budget * 3200 * base * 1.01


@pytest.mark.parametrize(("between", "every"), [(86400.0, 59), (3600.0, 12), (10.0, 3)])
def test_where_faults_are_rare_snapshots_are_too_but_never_beyond_the_budget(
    between: float, every: int, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "rekindle"):
        job = Job(1.0, 0.021, between=between)
        job.run(40)
    assert job.cadence.every == max(3, math.ceil(best_interval(0.021, between))) and abs(job.cadence.every - every) <= 2
    assert f"and a fault has come every {describe_seconds(between)}" in caplog.text


def test_a_start_knows_of_the_faults_that_snapshots_were_for(memory: Path, root: Path) -> None:
    job = job_in(memory, root)
    session = SimpleNamespace(job=job)
    assert _between_faults(session) is None and _between_faults(SimpleNamespace(job=None)) is None  # type: ignore[arg-type]
    write_incident(job, some(start="1" * 16, place="storage", seconds=3600.0))
    assert _between_faults(session) is None, "no snapshot would have helped"  # type: ignore[arg-type]
    write_incident(job, some(seconds=3600.0))
    assert _between_faults(session) == (7200 + 86400) / 2  # type: ignore[arg-type]


def test_until_it_is_known_every_other_step_is_saved() -> None:
    job = Job(1.0, 0.5)
    assert job.run(24) == list(range(2, 25, 2))


def test_a_job_that_changes_is_measured_again_and_says_why_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "rekindle"):
        job = Job(1.0, 0.005)
        job.run(300)
        assert job.cadence.every == 1 and not caplog.records
        job.cost = 0.04  # storage has become busy, say
        job.run(500)
        assert job.cadence.every == 4
        assert len(caplog.records) == 1 and "every 4 step(s) from now on, was 1" in caplog.text
        job.cost = 0.005
        job.run(1500)
        assert job.cadence.every == 1
        assert len(caplog.records) <= 3


def test_the_slowest_rank_decides() -> None:
    job = Job(1.0, 0.01, others=6.0)
    job.run(40)
    assert job.cadence.every == 6


def test_ranks_that_cannot_agree_save_every_step() -> None:
    """A superset of what any other rank may have settled for."""
    job = Job(1.0, 0.05)
    job.run(60)
    assert job.cadence.every == 5
    job.cadence._agree = lambda mine: lambda: math.nan
    job.run(100)
    assert job.cadence.every == 1


def _vote(rank: int, rendezvous: str, queue: object) -> None:
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=3)
    ask = agreement(3)
    answers = [ask(float(number))() for number in (rank, 10 - rank)]
    pending = ask(math.inf if rank == 1 else 0.5)
    queue.put((rank, [*answers, pending()]))
    if rank == 2:
        return  # gone
    try:
        queue.put((rank, ask(1.0)()))
    finally:
        time.sleep(0.5)


def test_agreement_among_real_ranks(tmp_path: Path) -> None:
    queue = context.Queue()
    ranks = [context.Process(target=_vote, args=(rank, str(tmp_path / "rendezvous"), queue)) for rank in range(3)]
    for process in ranks:
        process.start()
    found = [queue.get(timeout=60) for _ in range(5)]
    for process in ranks:
        process.join(60)
    assert [answer for _, answer in sorted(found, key=str) if isinstance(answer, list)] == [[2.0, 10.0, math.inf]] * 3
    left = [answer for _, answer in found if not isinstance(answer, list)]
    assert len(left) == 2 and all(math.isnan(answer) for answer in left), "a rank that is gone leaves no agreement"


def test_a_real_job_chooses_by_itself(root: Path, memory: Path) -> None:
    """Steps of 4 ms and a state of 16 MB: a snapshot at each step would cost far more than a tenth."""
    model = torch.nn.Linear(2000, 2000, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    ckpt = rekindle.Checkpointer(
        root, {"model": model, "optimizer": optimizer}, snapshot_every="auto", snapshot_budget=0.02, persist_every=10**6
    )
    ckpt.restore()
    for step in range(1, 130):
        time.sleep(0.004)
        optimizer.step()
        ckpt.step(step)
    assert ckpt.metrics.snapshot_every > 1
    assert 12 <= ckpt.metrics.saves < 12 + 105 / 2
    ckpt.close()


@pytest.mark.parametrize(
    "wrong",
    [
        *({"snapshot_every": value} for value in ("often", None, 0)),
        *({"snapshot_budget": value} for value in (0, 1, 1.5, "1%", None)),
        *({"keep": 0}, {"memory_limit": "1GB"}, {"memory_limit": -5}, {"memory_headroom": -1}, {"drain_limit": "fast"}),
    ],
)
def test_settings_that_make_no_sense(wrong: dict[str, object], root: Path, memory: Path) -> None:
    with pytest.raises(rekindle.UsageError, match="rate" if "drain_limit" in wrong else next(iter(wrong))):
        rekindle.Checkpointer(root, {"model": torch.nn.Linear(2, 2)}, **wrong)
