"""The time between drains that the agent chooses: by the price of one, and by faults that needed storage."""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from pathlib import Path

import pytest

from rekindle.agent.backlog import Backlog
from rekindle.agent.drain import Drainer
from rekindle.agent.pause import Pauses, pause_of
from rekindle.common.waste import best_interval
from rekindle.memory.incidents import write_incident
from rekindle.memory.job import JobInfo
from rekindle.memory.job_dir import JobDir
from rekindle.memory.prices import Prices, read_pause, write_pause, write_prices
from rekindle.storage.incidents import store_incident
from rekindle.storage.posix import PosixStore
from tests.memory.test_incident import some
from tests.stored import job_in, remember, save, steps_on

START = "a" * 16
DAY = 86400.0


@pytest.fixture
def job(memory: Path, root: Path) -> JobDir:
    return job_in(memory, root)


@pytest.fixture
def info(job: JobDir) -> JobInfo:
    said = job.read_job()
    assert said is not None
    said = replace(said, start=START, persist_seconds=30.0, persist_budget=0.01)
    job.write_job(said)
    return said


def priced(job: JobDir, cost: float, drain: float = 2.0) -> None:
    write_prices(job, START, Prices(0.5, 0.0, 0.5, drain, cost, 30.0))


def test_until_a_drain_has_a_price_nothing_is_chosen(job: JobDir, info: JobInfo) -> None:
    Pauses(job).choose(info)
    write_prices(job, START, Prices(0.5, 0.0))
    Pauses(job).choose(info)
    assert read_pause(job) is None and pause_of(job, info) == 30


def test_a_job_without_faults_is_taken_to_have_one_a_day(
    job: JobDir, info: JobInfo, caplog: pytest.LogCaptureFixture
) -> None:
    priced(job, 0.4)
    with caplog.at_level(logging.INFO, "rekindle.agent"):
        Pauses(job).choose(info)
    assert pause_of(job, info) == pytest.approx(best_interval(0.4, DAY), abs=0.01)
    assert "every 4.4min from now on, was 30s" in caplog.text and "0 times" in caplog.text
    priced(job, 0.45)
    Pauses(job).choose(info)
    assert len(caplog.records) == 1, "that is about the same"


def test_faults_that_needed_storage_count_of_memory_and_of_storage_each_once(
    job: JobDir, info: JobInfo, root: Path
) -> None:
    save(root, 1)
    lost = [some(start=f"{n:016x}", place="storage", seconds=9 * DAY / 4) for n in range(4)]
    for one in lost[:3]:
        store_incident(PosixStore(root), one)
    for one in [*lost[2:], some(start="f" * 16, seconds=0.0)]:  # the last went on from memory
        write_incident(job, one)
    priced(job, 2.0)
    Pauses(job).choose(info)
    assert pause_of(job, info) == pytest.approx(best_interval(2.0, 10 * DAY / 5), abs=0.01)


def test_the_budget_is_kept_where_faults_are_many(job: JobDir, info: JobInfo) -> None:
    for number in range(40):
        write_incident(job, some(start=f"{number:016x}", place="storage", seconds=60.0))
    priced(job, 2.0)
    Pauses(job).choose(info)
    assert pause_of(job, info) == 200.0


def test_the_drain_keeps_the_chosen_pause_and_never_writes_for_over_a_tenth_of_the_time(
    job: JobDir, info: JobInfo, root: Path
) -> None:
    lock = job.lock_rank(0, 1.0)
    priced(job, 0.4)
    write_pause(job, 100.0)
    job.notes.write_last_drain(time.monotonic() - 99, 1.0)
    backlog = Backlog(job)
    assert not backlog._due(info)
    job.notes.write_last_drain(time.monotonic() - 101, 1.0)
    assert backlog._due(info)
    job.notes.write_last_drain(time.monotonic() - 101, 11.0)
    assert not backlog._due(info)
    assert backlog._due(replace(info, persist_budget=None, persist_seconds=0.0)) is False
    lock.release()
    remember(job, 5)
    assert Drainer(job).tick() and steps_on(root) == [5]
    assert pause_of(job, info) == pytest.approx(best_interval(0.4, DAY), abs=0.01), "each drain chooses anew"


def test_who_told_a_time_gets_it(job: JobDir, info: JobInfo) -> None:
    priced(job, 0.4)
    told = replace(info, persist_budget=None, persist_seconds=600.0)
    write_pause(job, 100.0)  # of an earlier start
    Pauses(job).choose(told)
    assert pause_of(job, told) == 600 and read_pause(job) == 100
    assert pause_of(job, replace(told, persist_seconds=None)) == float("inf")
