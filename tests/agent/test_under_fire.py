"""A live agent whose sockets get what nobody should send: it lives, holds little, answers, and drains go on."""

from __future__ import annotations

import json
import os
import select
import socket
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from rekindle.agent.http import send_request
from rekindle.errors import AgentError
from rekindle.format.lineage import Incarnation, ShardId
from rekindle.format.names import step_dir
from rekindle.memory.job import JobInfo
from rekindle.memory.job_dir import JobDir, memory_base
from rekindle.memory.slots import Slots
from rekindle.memory.status import StatusPage
from rekindle.session.agent_keeper import spawn
from rekindle.storage.catalog import find_copies
from rekindle.storage.posix import PosixStore
from rekindle.storage.verify import verify
from tests.conftest import commit, make_shard
from tests.faults.harness import wait_for

FIRST = Incarnation(1, "a" * 16)
MANY = 300
"""Connections at a time: far more than there are ranks, and each is a file."""


@pytest.fixture
def job(memory: Path, root: Path) -> Iterator[JobDir]:
    """One with a live agent, which the fixture ``memory`` ends. This process is its only trainer."""
    job = JobDir.of(root, memory_base())
    job.create()
    job.write_job(JobInfo(str(root), [0], 1, 2, None, 600.0))
    lock = job.lock_rank(0, 1.0)
    agent = spawn(job)
    wait_for(lambda: job.paths.agent_socket.exists() and job.paths.watch_socket.exists())
    yield job
    assert agent.poll() is None, job.paths.agent_log.read_text()[-3000:]
    lock.release()


def save(job: JobDir, root: Path, step: int) -> None:
    """A snapshot of ``step``, which is then to be found on storage, sound."""
    receipt, data = make_shard(ShardId(step, 0, 1, FIRST), {"x": bytes([step]) * 10_000})
    slots = Slots(job, 0, 1, [0])
    slots.adopt()
    commit(slots, receipt, data)
    slots.close()
    wait_for((root / step_dir(step)).exists)  # not the manifest alone: the directory gets its name after it
    assert verify(find_copies(None, PosixStore(root))[0]) == []


def connected(path: Path) -> socket.socket:
    line = socket.socket(socket.AF_UNIX)
    line.connect(str(path))  # waits while too many others do
    line.settimeout(60.0)
    return line


def say(path: Path, data: bytes) -> None:
    """Send something, and go: an answer is not read, and ends the sending."""
    with suppress(OSError), connected(path) as line:
        line.setblocking(False)
        left = memoryview(data)
        while left and not select.select([line], [line], [], 60.0)[0]:
            left = left[line.send(left) :]


def answers(job: JobDir) -> bool:
    """False while there are too many others in the queue before its door."""
    try:
        return send_request(job.paths.agent_socket, "GET", "/status")["error"] is None
    except AgentError:
        return False


def held(job: JobDir) -> tuple[int, int]:
    """Returns the number of files that the agent has open, and the MiB of memory that it holds."""
    pid = job.agent()
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return len(os.listdir(f"/proc/{pid}/fd")), pages * os.sysconf("SC_PAGESIZE") >> 20


def test_garbage_is_refused(job: JobDir, root: Path) -> None:
    hello = {"rank": 0, "pid": os.getpid(), "watchdog": 60.0, "deadline": 1.0, "stacks": 0, "since": 0.0, "joined": 0.0}
    odd = [{**hello, key: value} for key in hello for value in (None, "x", -1, 10**30, [], 1e308, float("inf"))]
    StatusPage(job.paths.status_page(0), 1)
    save(job, root, 1)
    before = held(job)
    for data in (
        b"\0" * 5000,
        os.urandom(5000),
        b"[" * 100_000 + b"\n",
        b"9" * 100_000 + b"\n",
        b"x" * (3 << 20),
        b"\n",
    ):
        say(job.paths.watch_socket, data)
        say(job.paths.agent_socket, data)
    for one in odd * 5:
        say(job.paths.watch_socket, json.dumps(one).encode() + b"\n")
    for fault in ({}, {"fault": 5}, {"fault": {"noticed": "now"}}, {"fault": {**dict.fromkeys(hello), "cause": []}}):
        say(job.paths.watch_socket, json.dumps(hello).encode() + b"\n" + json.dumps(fault).encode() + b"\n")
    for line in (b"POST /drill?rank=9e9&fault=x", b"POST /drill", b"GET /%00", b"POST /drill?rank=" + b"9" * 5000):
        say(job.paths.agent_socket, line + b" HTTP/1.1\r\nHost: a\r\n\r\n")
    say(job.paths.agent_socket, b"POST /stop HTTP/1.1\r\nContent-Length: 99999999999999999999\r\n\r\n")
    say(job.paths.agent_socket, b"GET /status HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nffffffffffffffff\r\n")
    save(job, root, 2)
    assert send_request(job.paths.agent_socket, "GET", "/status")["error"] is None
    wait_for(lambda: held(job)[0] <= before[0] + 3)  # one rank: its page, and two files that refer to its process
    assert held(job)[1] < before[1] + 64
    log = job.paths.agent_log.read_text()  # aiohttp tells of each malformed question, at length
    assert "never retrieved" not in log and "a check of the ranks failed" not in log, log[-3000:]


def test_half_questions_keep_nobody_out(job: JobDir, root: Path) -> None:
    """Hundreds of connections that say little or nothing, and stay."""
    open_files = len(os.listdir("/proc/self/fd"))
    lines = []
    for number in range(MANY):
        for path in (job.paths.agent_socket, job.paths.watch_socket):
            with suppress(OSError):
                lines.append(connected(path))
                lines[-1].sendall((b"GET /status HTTP/1.1\r\nHost: ", b"", b'{"rank": ')[number % 3])
    assert len(os.listdir("/proc/self/fd")) > open_files + MANY
    for line in lines[-20:]:
        with suppress(OSError):
            line.sendall(b"a")
    wait_for(lambda: answers(job))
    save(job, root, 1)
    files, mib = held(job)
    assert files < 200 and mib < 200, f"{files} files, {mib} MiB"
    for line in lines:
        line.close()
