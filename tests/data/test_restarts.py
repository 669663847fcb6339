"""Jobs that SIGKILL ends in the middle of an epoch: each step, and the end, are those of the unbroken run."""

from __future__ import annotations

import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.data.job import MOMENTS, Job
from tests.faults.harness import finish


def end_of(job: Job, where: Path) -> tuple[dict[int, str], str]:
    """What the job writes without a Checkpointer, which draws no random numbers, and without a fault."""
    alone = replace(job, out=where / f"alone-{job.out.name}", root=None, die=None)
    assert finish([alone.start()]) == [0]
    return alone.written()


def test_a_job_that_is_killed_goes_on_in_the_middle_of_an_epoch(root: Path, memory: Path, tmp_path: Path) -> None:
    job = Job(tmp_path / "job", root=root, memory=memory, die=(8, "updated"))
    assert finish([job.start()]) == [-signal.SIGKILL]
    assert finish([replace(job, die=None).start()]) == [0]
    assert job.written() == end_of(job, tmp_path)


@pytest.mark.campaign
@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize(
    ("kind", "exact"),
    [("workers", "replay"), ("stream-workers", "replay"), ("persistent", "seeded"), ("stream", "seeded")],
)
def test_jobs_of_other_kinds_go_on(
    kind: str, exact: Any, moment: str, root: Path, memory: Path, tmp_path: Path
) -> None:
    """They are killed twice, the first time in the last step of an epoch."""
    job = Job(tmp_path / "job", kind=kind, exact=exact, root=root, memory=memory)
    for step in (5, 7):
        assert finish([replace(job, die=(step, moment)).start()]) == [-signal.SIGKILL]
    assert finish([job.start()]) == [0]
    assert job.written() == end_of(job, tmp_path)


@pytest.mark.campaign
@pytest.mark.parametrize("dying", [(1,), (0, 1)])
@pytest.mark.parametrize("exact", ["replay", "seeded"])
def test_two_ranks_go_on(exact: Any, dying: tuple[int, ...], root: Path, memory: Path, tmp_path: Path) -> None:
    """One of them is killed, or both."""
    jobs = [Job(tmp_path / f"rank{rank}", exact=exact, root=root, memory=memory, rank=rank, world=2) for rank in (0, 1)]

    def start(number: int, jobs: list[Job]) -> list[int | None]:
        return finish([replace(job, rendezvous=str(tmp_path / f"meeting-{number}")).start() for job in jobs])

    killed = start(0, [replace(job, die=(8, "updated") if job.rank in dying else None) for job in jobs])
    assert all(killed[rank] == -signal.SIGKILL for rank in dying)
    assert start(1, jobs) == [0, 0]
    alone = [replace(job, out=tmp_path / f"alone{job.rank}", root=None) for job in jobs]
    assert start(2, alone) == [0, 0]
    assert [job.written() for job in jobs] == [job.written() for job in alone]
