"""Dead ranks that no agent watched are found, and nobody else is taken for one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from rekindle.agent.unwatched import UnwatchedDeath, find_unwatched_deaths
from rekindle.memory.job_dir import JobDir
from rekindle.memory.status import DONE, STABLE, StatusPage

_GENERATION = 4


@pytest.fixture
def job(tmp_path: Path) -> JobDir:
    """A job whose directory nobody uses."""
    job = JobDir(tmp_path / "rekindle-0" / "job")
    job.create()
    return job


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    """A process that does nothing until its input ends."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        yield process
        process.kill()


@pytest.fixture
def dead(process: subprocess.Popen[bytes]) -> int:
    """The id of a process that has ended and was collected."""
    process.kill()
    process.wait()
    return process.pid


def write_page(job: JobDir, rank: int, pid: int, phase: int = STABLE, generation: int = _GENERATION) -> None:
    """Writes the page of a rank that has made 7 steps."""
    page = StatusPage(job.paths.status_page(rank), generation)
    page._pid, page.phase, page.step = pid, phase, 7
    page.write()


def find(job: JobDir, watched: tuple[int, ...] = (0,), since: float = 0.0) -> list[UnwatchedDeath]:
    return find_unwatched_deaths(job, watched, _GENERATION, since)


def test_a_dead_rank_is_found(job: JobDir, dead: int) -> None:
    write_page(job, 0, os.getpid())
    before = time.monotonic()
    write_page(job, 1, dead)
    found = find(job, since=before)
    assert [(death.rank, death.page.step, death.status) for death in found] == [(1, 7, None)]


def test_its_end_is_told_while_nobody_has_collected_it(job: JobDir, process: subprocess.Popen[bytes]) -> None:
    write_page(job, 1, process.pid)
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    (death,) = find(job)
    assert death.status is not None and os.WTERMSIG(death.status) == signal.SIGKILL


def test_a_live_rank_is_none_even_if_its_lock_was_removed(job: JobDir, process: subprocess.Popen[bytes]) -> None:
    write_page(job, 1, process.pid)
    assert find(job) == []


def test_a_rank_in_another_container_is_none(job: JobDir, dead: int) -> None:
    """Its process id means nothing here, but its lock is held."""
    write_page(job, 1, dead)
    lock = job.lock_rank(1, 1.0)
    try:
        assert find(job) == []
    finally:
        lock.release()
    assert len(find(job)) == 1


def test_a_rank_that_has_ended_well_is_none(job: JobDir, dead: int) -> None:
    write_page(job, 1, dead, phase=DONE)
    assert find(job) == []


def test_a_rank_that_is_watched_is_left_to_who_watches_it(job: JobDir, dead: int) -> None:
    write_page(job, 1, dead)
    assert find(job, watched=(0, 1)) == []


def test_a_rank_of_an_earlier_start_is_none(job: JobDir, dead: int) -> None:
    """Starts have the same generation where the earlier one has saved nothing."""
    write_page(job, 1, dead, generation=_GENERATION - 1)
    write_page(job, 2, dead)
    assert find(job, since=time.monotonic()) == []
    assert [death.rank for death in find(job)] == [2]


def test_a_damaged_page_tells_nothing(job: JobDir, dead: int) -> None:
    write_page(job, 1, dead)
    with closing(job.paths.status_page(1).open("r+b")) as page:
        page.write(b"\0" * 8)
    assert find(job) == []
