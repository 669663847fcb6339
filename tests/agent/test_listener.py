"""Requests to an agent that has answered none yet."""

from __future__ import annotations

import itertools
import os
import resource
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from rekindle.agent.http import send_request
from rekindle.errors import AgentError
from rekindle.memory.job import JobInfo
from rekindle.memory.job_dir import JobDir, memory_base
from rekindle.session.agent_keeper import spawn
from tests.faults.harness import wait_for


@pytest.fixture
def job(memory: Path, root: Path) -> Iterator[JobDir]:
    """One with a live agent, which the fixture ``memory`` ends."""
    job = JobDir.of(root, memory_base())
    job.create()
    job.write_job(JobInfo(str(root), [0], 1, 2, None, 600.0))
    lock = job.lock_rank(0, 1.0)
    spawn(job)
    wait_for(lambda: job.agent() and job.paths.agent_status.exists())
    yield job
    lock.release()


def status(job: JobDir) -> dict[str, object]:
    return send_request(job.paths.agent_socket, "GET", "/status", timeout=30.0)


def has_loaded_server(job: JobDir) -> bool:
    """True if the agent has libraries of its HTTP server in its memory."""
    return "aiohttp" in Path(f"/proc/{job.agent()}/maps").read_text()


def next_descriptor(pid: int) -> int:
    """Returns the number of the next file that a process will open."""
    taken = set(map(int, os.listdir(f"/proc/{pid}/fd")))
    return next(number for number in itertools.count() if number not in taken)


def test_the_server_is_loaded_when_the_first_request_comes(job: JobDir) -> None:
    assert not has_loaded_server(job)
    assert status(job)["pid"] == job.agent()
    assert has_loaded_server(job)


def test_many_first_requests_at_once(job: JobDir) -> None:
    found: list[object] = []
    threads = [threading.Thread(target=lambda: found.append(status(job)["pid"])) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60.0)
    assert found == 8 * [job.agent()]


def test_an_agent_without_descriptors_answers_once_it_has_some(job: JobDir) -> None:
    agent = job.agent()
    assert agent
    before = resource.prlimit(agent, resource.RLIMIT_NOFILE)
    resource.prlimit(agent, resource.RLIMIT_NOFILE, (min(next_descriptor(agent) for _ in range(100)), before[1]))
    with pytest.raises(AgentError, match="does not answer"):
        send_request(job.paths.agent_socket, "GET", "/status", timeout=3.0)
    wait_for(lambda: "can't answer requests now" in job.paths.agent_log.read_text())
    resource.prlimit(agent, resource.RLIMIT_NOFILE, before)
    assert status(job)["pid"] == agent
