"""The rank monitor names the first cause of several ends, also when it sees them late."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rekindle.agent.monitor import RankMonitor
from rekindle.agent.others import Others
from rekindle.memory.fault import Fault
from rekindle.memory.job_dir import JobDir
from rekindle.memory.status import SECURED, SECURING, StatusPage
from tests.agent.cgroups import cgroup as cgroup  # a fixture
from tests.agent.cgroups import run_out_of_memory
from tests.faults.harness import wait_for

RANK = """
import json, os, socket, sys, time
rank, path = int(sys.argv[1]), sys.argv[2]
line = socket.socket(socket.AF_UNIX)
line.connect(path)
hello = {"rank": rank, "pid": os.getpid(), "watchdog": None, "deadline": 25.0, "stacks": 0}
hello |= {"since": time.monotonic(), "joined": float(sys.argv[3])}
line.sendall(json.dumps(hello).encode() + b"\\n")
words, code = json.loads(sys.stdin.readline())
line.sendall(words.encode())
os._exit(code)
"""


class Rank:
    """A process that is connected to the agent as a rank, and the page that it would write."""

    def __init__(self, job: JobDir, number: int) -> None:
        self.page = StatusPage(job.paths.status_page(number), 1)
        command = [sys.executable, "-c", RANK, str(number), str(job.paths.watch_socket), "0"]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, text=True)

    def knows_of_a_fault(self) -> None:
        self.page.stage = SECURED
        self.page.write()

    def leave(self, code: int, words: str = "") -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([words, code]) + "\n")
        self.process.stdin.flush()
        self._see_the_end()

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self._see_the_end()

    def _see_the_end(self) -> None:
        os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOWAIT)  # it stays a zombie, whose status can be read


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[Callable[[JobDir], list[Rank]]]:
    """Starts two ranks; both are collected at the end."""
    made: list[Rank] = []

    def begin(job: JobDir) -> list[Rank]:
        made.extend(Rank(job, number) for number in (0, 1))
        return made

    yield begin
    for rank in made:
        rank.process.kill()
        rank.process.communicate()


def first_cause(
    place: Path,
    ranks: Callable[[JobDir], list[Rank]],
    events: Callable[[Rank, Rank], object],
    prepare: Callable[[], object] | None = None,
) -> Fault:
    """The fault that an agent takes up which gets no processor while ``events`` befall two ranks.

    ``prepare`` is called some checks before, when both are there.
    """
    job = JobDir(place)

    async def monitored() -> Fault:
        monitor = RankMonitor(job, lambda urgent: None)
        serving = asyncio.ensure_future(monitor.serve())
        while not job.paths.watch_socket.exists():
            await asyncio.sleep(0.01)
        both = await asyncio.to_thread(ranks, job)
        until = time.monotonic() + 100
        while len(monitor.ranks) < 2 or not monitor._search_at:  # the next search is half a second away
            assert time.monotonic() < until
            await asyncio.sleep(0.01)
        monitor.ranks = dict(sorted(monitor.ranks.items()))  # the order of connecting must not decide
        if prepare is not None:
            prepare()
            await asyncio.sleep(0.2)
        events(*both)  # the loop stands still meanwhile
        while monitor.fault is None:
            assert time.monotonic() < until
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.05)  # several looks more
        serving.cancel()
        return monitor.fault

    fault = asyncio.run(monitored())
    wait_for(job.paths.fault.exists)
    assert json.loads(job.paths.fault.read_bytes())["what"] == fault.what
    return fault


def test_a_survivor_that_ended_because_of_a_death_is_not_its_cause(
    tmp_path: Path, ranks: Callable[[JobDir], list[Rank]]
) -> None:
    def events(survivor: Rank, victim: Rank) -> None:
        victim.kill()
        survivor.knows_of_a_fault()
        survivor.leave(143)

    fault = first_cause(tmp_path, ranks, events)
    assert (fault.cause, fault.rank, fault.what) == ("signal", 1, "rank 1 was killed by SIGKILL")


def test_nor_one_that_ended_without_a_word(tmp_path: Path, ranks: Callable[[JobDir], list[Rank]]) -> None:
    def events(survivor: Rank, victim: Rank) -> None:
        victim.kill()
        survivor.leave(1)

    fault = first_cause(tmp_path, ranks, events)
    assert (fault.cause, fault.rank) == ("signal", 1)


def test_the_last_words_of_a_rank_say_more_than_its_exit_code(
    tmp_path: Path, ranks: Callable[[JobDir], list[Rank]]
) -> None:
    def events(raises: Rank, other: Rank) -> None:
        words = {"fault": Fault("exception", 0, 1, 7, "rank 0 raised ValueError: odd").to_json()}
        raises.knows_of_a_fault()
        raises.leave(1, json.dumps(words) + "\n")

    fault = first_cause(tmp_path, ranks, events)
    assert (fault.cause, fault.rank, fault.step) == ("exception", 0, 7)


def test_a_rank_that_secured_its_state_and_said_nothing_is_reported_by_its_exit_code(
    tmp_path: Path, ranks: Callable[[JobDir], list[Rank]]
) -> None:
    def events(leaves: Rank, other: Rank) -> None:
        leaves.knows_of_a_fault()
        leaves.leave(3)

    fault = first_cause(tmp_path, ranks, events)
    assert (fault.cause, fault.what) == ("exit", "rank 0 ended with exit code 3")


def test_a_rank_that_raises_because_of_a_death_that_nobody_watched_is_not_its_cause(
    tmp_path: Path, ranks: Callable[[JobDir], list[Rank]]
) -> None:
    """As after an agent that died together with rank 2, of which the next one has heard nothing."""

    def events(raises: Rank, other: Rank) -> None:
        ended = subprocess.Popen([sys.executable, "-c", ""])
        ended.wait()
        page = StatusPage(JobDir(tmp_path).paths.status_page(2), 1)
        page._pid = ended.pid
        page.write()
        words = {"fault": Fault("exception", 0, 1, 7, "rank 0 raised RuntimeError: closed by peer").to_json()}
        raises.knows_of_a_fault()
        raises.leave(1, json.dumps(words) + "\n")

    fault = first_cause(tmp_path, ranks, events)
    assert (fault.cause, fault.rank) == ("exit", 2)


def test_a_kill_for_want_of_memory_in_another_group_is_no_cause(
    tmp_path: Path, ranks: Callable[[JobDir], list[Rank]], cgroup: Path
) -> None:
    def events(victim: Rank, other: Rank) -> None:
        run_out_of_memory(cgroup)
        victim.kill()

    fault = first_cause(tmp_path, ranks, events)
    assert (fault.cause, fault.what) == ("signal", "rank 0 was killed by SIGKILL")


def test_a_rank_that_is_told_late_of_a_fault_elsewhere_has_all_its_time(
    tmp_path: Path, ranks: Callable[[JobDir], list[Rank]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One is at it, as its page shows; the other has not begun yet."""
    monkeypatch.setattr("rekindle.agent.monitor._STUCK_AFTER", 600.0)
    job = JobDir(tmp_path)

    async def monitored() -> None:
        monitor = RankMonitor(job, lambda urgent: None)
        serving = asyncio.ensure_future(monitor.serve())
        while not job.paths.watch_socket.exists():
            await asyncio.sleep(0.01)
        both = await asyncio.to_thread(ranks, job)
        both[0].page.stage = SECURING
        both[0].page.write()
        until = time.monotonic() + 100
        while len(monitor.ranks) < 2:
            assert time.monotonic() < until
            await asyncio.sleep(0.01)
        since = time.monotonic() - 1000.0
        for rank in monitor.ranks.values():  # they have trained for long
            rank.since, rank.deadline = since, 700.0
        assert monitor.hear(Fault("signal", 7, 1, 7, "rank 7 was killed by SIGKILL", noticed=since))
        await asyncio.sleep(1.0)  # many checks
        assert [rank.process.poll() for rank in both] == [None, None]
        for rank in monitor.ranks.values():
            rank.deadline = 0.0
        while any(rank.process.poll() is None for rank in both):
            assert time.monotonic() < until
            await asyncio.sleep(0.01)
        serving.cancel()

    asyncio.run(monitored())


def test_how_far_ranks_were_that_were_told_to_go_is_not_said_of_the_next_start(tmp_path: Path) -> None:
    monitor = RankMonitor(JobDir(tmp_path), lambda urgent: None)
    monitor.fault, monitor._reached = Fault("notice", 0, 1, 500, "rank 0 was sent SIGTERM"), 501
    assert monitor.account().reached == 501
    monitor.others = Others()
    monitor.others.since = time.monotonic()
    assert monitor.account().reached == -1


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="this system reports no ends")
def test_an_end_that_the_kernel_reports_is_seen_before_the_next_check(
    tmp_path: Path, ranks: Callable[[JobDir], list[Rank]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def check_no_more() -> None:  # once the check has come that is on its way
        monkeypatch.setattr("rekindle.agent.monitor._SELDOM", 1e9)

    fault = first_cause(tmp_path, ranks, lambda one, two: one.kill(), check_no_more)
    assert fault.what == "rank 0 was killed by SIGKILL"


@pytest.mark.parametrize(
    ("large", "reported", "pause"), [(1 << 50, True, 0.1), (0, True, 0.05), (1 << 50, False, 0.05)]
)
def test_ranks_are_checked_often_only_where_the_kernel_reports_their_end_late(
    tmp_path: Path,
    ranks: Callable[[JobDir], list[Rank]],
    monkeypatch: pytest.MonkeyPatch,
    large: int,
    reported: bool,
    pause: float,
) -> None:
    monkeypatch.setattr("rekindle.agent.monitor._LARGE", large)
    if not reported:
        monkeypatch.delattr(os, "pidfd_open", raising=False)
    elif not hasattr(os, "pidfd_open"):
        pytest.skip("this system reports no ends")
    job = JobDir(tmp_path)

    async def monitored() -> None:
        monitor = RankMonitor(job, lambda urgent: None)
        serving = asyncio.ensure_future(monitor.serve())
        try:
            while not job.paths.watch_socket.exists():
                await asyncio.sleep(0.01)
            await asyncio.to_thread(ranks, job)
            until = time.monotonic() + 100
            while len(monitor.ranks) < 2:
                assert time.monotonic() < until
                await asyncio.sleep(0.01)
            monitor._check_ranks()
            assert monitor._pause() == pause
        finally:
            serving.cancel()

    asyncio.run(monitored())


@pytest.mark.parametrize(("ago", "pause"), [(1.0, 0.01), (100.0, 0.1)])
def test_a_process_that_lives_on_after_a_fault_costs_little(tmp_path: Path, ago: float, pause: float) -> None:
    """As that of a notebook does, whose cell has raised: its lock is looked at less often after a while."""
    monitor = RankMonitor(JobDir(tmp_path), lambda urgent: None)
    assert monitor._pause() == 0.1
    fault = Fault("exception", 0, 1, 7, "rank 0 raised ValueError: odd", noticed=time.monotonic() - ago)
    monitor.fault, monitor._end_awaited = fault, True
    assert monitor._pause() == pause and not monitor.has_seen_all
