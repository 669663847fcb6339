"""Records of incidents on their way to storage: bounded, and never in the way of anything."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from rekindle.agent.drain import Drainer
from rekindle.agent.http import send_request
from rekindle.agent.records import RecordCarrier
from rekindle.errors import AgentError
from rekindle.memory.incidents import incident_files, write_incident
from rekindle.memory.job_dir import JobDir
from rekindle.storage import incidents as stored
from rekindle.storage.incidents import INCIDENTS, load_incidents
from rekindle.storage.posix import PosixStore
from tests.faults.harness import wait_for
from tests.memory.test_incident import some
from tests.stored import job_in, remember, save, steps_on


@pytest.fixture
def job(memory: Path, root: Path) -> JobDir:
    return job_in(memory, root)


def test_a_record_follows_the_first_checkpoint(job: JobDir, root: Path) -> None:
    write_incident(job, some())
    carrier = RecordCarrier(job)
    assert carrier.wanting()
    carrier.carry()
    assert not root.exists(), "a root that isn't mounted must not get a record"
    save(root, 1)
    carrier.carry()
    assert load_incidents(PosixStore(root)) == ([some()], [])
    write_incident(job, some(restored_step=7))
    carrier.carry()
    assert load_incidents(PosixStore(root)) == ([some(restored_step=7)], [])


def test_a_record_that_is_not_complete_is_carried_at_the_end(job: JobDir, root: Path) -> None:
    save(root, 1)
    open_one = some(moments={"noticed": 1.0})
    write_incident(job, open_one)
    carrier = RecordCarrier(job)
    carrier.carry()
    assert load_incidents(PosixStore(root)) == ([], [])
    carrier.carry(last=True)
    assert load_incidents(PosixStore(root)) == ([open_one], [])


def test_the_drain_carries_records_when_it_has_nothing_else_to_do(job: JobDir, root: Path) -> None:
    remember(job, 1)
    write_incident(job, some())
    drainer = Drainer(job)
    assert drainer.tick() and steps_on(root) == [1] and not (root / INCIDENTS).exists()
    assert not drainer.tick() and load_incidents(PosixStore(root)) == ([some()], [])
    assert drainer.progress.moved is None and drainer.progress.error is None


def refused(job: JobDir, root: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Sees that a record which storage refuses costs one line, and nothing else."""
    write_incident(job, some())
    drainer = Drainer(job)
    with caplog.at_level(logging.INFO):
        for _ in range(3):
            drainer.records.carry()
            assert not drainer.tick() and drainer.progress.error is None
        drainer.records.carry(last=True)
    assert [r.levelname for r in caplog.records] == ["WARNING"], caplog.text
    assert caplog.messages[0].startswith("storage refused the record of an incident; memory has it until the job ends")
    assert steps_on(root) == [1] and drainer.pending() is None


def test_something_else_in_the_place_of_the_records(job: JobDir, root: Path, caplog: pytest.LogCaptureFixture) -> None:
    save(root, 1)
    (root / INCIDENTS).write_text("somebody's own")
    refused(job, root, caplog)


def test_a_root_that_is_read_only(memory: Path, mounted: Callable[..., Path], caplog: pytest.LogCaptureFixture) -> None:
    disk = mounted("disk", "-t", "tmpfs", "tmpfs")
    save(disk / "run", 1)
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    refused(job_in(memory, disk / "run"), disk / "run", caplog)


def test_a_damaged_record_in_memory_is_skipped_with_a_word(
    job: JobDir, root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save(root, 1)
    write_incident(job, some(generation=1))
    write_incident(job, some(generation=2))
    torn = incident_files(job)[0]
    torn.write_bytes(torn.read_bytes()[:100])
    RecordCarrier(job).carry()
    assert load_incidents(PosixStore(root)) == ([some(generation=2)], [])
    assert f"{torn} is no record of an incident" in caplog.text and incident_files(job) == [
        job.paths.incidents / some(generation=2).name
    ]


def test_storage_keeps_a_bounded_number(job: JobDir, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored, "_MOST", 3)
    save(root, 1)
    (root / INCIDENTS).mkdir()
    (root / INCIDENTS / "somebody's own").touch()
    for generation in range(1, 7):
        write_incident(job, some(generation=generation))
    RecordCarrier(job).carry()
    assert [one.generation for one in load_incidents(PosixStore(root))[0]] == [4, 5, 6]
    assert (root / INCIDENTS / "somebody's own").exists()


def test_links_and_torn_files_on_storage_are_skipped_with_a_word(root: Path, tmp_path: Path) -> None:
    save(root, 1)
    store = PosixStore(root)
    stored.store_incident(store, some(generation=1))
    stored.store_incident(store, some(generation=2))
    first, second = store.extras(INCIDENTS)
    (root / first).write_bytes((root / first).read_bytes()[:50])
    (tmp_path / "elsewhere").write_bytes(some(generation=3).encode())
    (root / INCIDENTS / "0000000003-link.jsonl").symlink_to(tmp_path / "elsewhere")
    found, problems = load_incidents(store)
    assert [one.generation for one in found] == [2] and len(problems) == 2
    assert problems[0].startswith(f"{root}/{first} is no record of an incident")
    assert "is a symbolic link" in problems[1] and second.startswith(INCIDENTS)


RANK = """
import json, os, socket, sys, time
from pathlib import Path
from rekindle.agent.address import socket_address
from rekindle.common.process_start import clock_id, process_started
from rekindle.memory.incidents import StartRecord, write_start
from rekindle.memory.job_dir import JobDir
from rekindle.memory.status import STABLE, StatusPage

job = JobDir(Path(sys.argv[1]))
lock = job.lock_rank(0, 10)
print("is there", flush=True)
now = time.monotonic()
write_start(job, StartRecord("0123456789abcdef", 4, clock_id(), now, process_started(), now, 3))
page = StatusPage(job.paths.status_page(0), 4)
page.phase, page.step = STABLE, 5
page.write()
line = socket.socket(socket.AF_UNIX)
while True:
    try:
        with socket_address(job.paths.watch_socket) as name:
            line.connect(name)
        break
    except OSError:
        time.sleep(0.02)
hello = {"rank": 0, "pid": os.getpid(), "watchdog": None, "deadline": 25.0, "stacks": 0}
line.sendall(json.dumps({**hello, "since": now, "joined": now}).encode() + b"\\n")
print("trains", flush=True)
while line.recv(4096):
    pass
"""
"""A rank in its guarded part, as its agent sees one."""


def is_watched(job: JobDir) -> bool:
    """Returns True once the agent knows of the rank: it can be sent something, which that rank ignores."""
    try:
        return bool(send_request(job.paths.agent_socket, "POST", "/drill?rank=0&fault=none")["told"])
    except AgentError:
        return False


def test_a_job_that_does_not_come_back_leaves_a_record(job: JobDir, root: Path) -> None:
    save(root, 5)
    rank = subprocess.Popen([sys.executable, "-c", RANK, str(job.path)], stdout=subprocess.PIPE, text=True)
    assert rank.stdout is not None and rank.stdout.readline() == "is there\n"  # else the agent has no job
    agent = subprocess.Popen([sys.executable, "-m", "rekindle.agent", str(job.path)])
    try:
        assert rank.stdout.readline() == "trains\n"
        wait_for(lambda: is_watched(job), what="the agent knows of the rank")
        rank.kill()
        assert agent.wait(100) == 0 and not job.path.exists(), "memory is still there"
    finally:
        rank.kill()
        rank.wait()
        agent.kill()
        agent.wait()
    (incident,), problems = load_incidents(PosixStore(root))
    assert problems == [] and (incident.cause, incident.what) == ("signal", "rank 0 was killed by SIGKILL")
    assert (incident.rank, incident.step, incident.began_at, incident.generation) == (0, 5, 3, 4)
    assert incident.moments.keys() == {"noticed", "gone"} and incident.outage is None
    assert incident.moments["noticed"] <= incident.moments["gone"]
