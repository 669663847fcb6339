"""The agent while it drains: within its budget, behind everybody else, and gone when it is told to go."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from rekindle.agent.drain import Drainer
from rekindle.agent.spawn import AgentKeeper, spawn
from rekindle.snapshot.lineage import Incarnation, Stamp
from rekindle.snapshot.memory import Job, JobDir, memory_base
from rekindle.snapshot.names import step_dir
from rekindle.snapshot.slots import Slots
from rekindle.storage.catalog import survey
from rekindle.storage.posix import PosixStore
from rekindle.storage.verify import verify
from tests.conftest import make_shard

FIRST = Incarnation(1, "a" * 16)
MB = 1_000_000

linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs /proc")


@pytest.fixture
def job(memory: Path, root: Path) -> JobDir:
    job = JobDir.of(root, memory_base())
    job.create()
    return job


@pytest.fixture
def snapshot(job: JobDir, root: Path) -> Iterator[Callable[..., None]]:
    """Puts a snapshot of so many bytes of each rank into memory, and says what the job is."""
    with ExitStack() as stack:

        def save(nbytes: int, drain_limit: int | None = None, ranks: int = 1, step: int = 1) -> None:
            everyone = list(range(ranks))
            job.write_job(Job(str(root), everyone, ranks, 2, None, 600.0, drain_limit))
            for rank in everyone:
                stamp = Stamp(step, rank, ranks, FIRST, persist=True)
                receipt, data = make_shard(stamp, {"x": bytes([rank]) * nbytes})
                slots = Slots(job, rank, ranks, everyone)
                stack.callback(slots.close)
                slot = slots.acquire(step, FIRST, len(data))
                assert slot.map is not None
                slot.map[:] = data
                slots.commit(slot, stamp, receipt.raw)

        yield save


def wait_for(condition: Callable[[], object], timeout: float = 20.0) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.01)


def assert_sound(root: Path, step: int = 1) -> None:
    copies = survey(None, PosixStore(root))
    assert [(copy.step, verify(copy)) for copy in copies] == [(step, [])]


def drained(job: JobDir) -> int:
    return int(json.loads(job.agent_status.read_text())["done"]) if job.agent_status.exists() else 0


# -- the budget ------------------------------------------------------------------------------------------------------


def test_a_job_file_of_before_there_were_limits_still_says_what_the_job_is(job, root):
    old = {"root": str(root), "ranks": [0], "world": 1, "keep": 2, "keep_every": None, "idle_timeout": 600.0}
    (job.path / "job.json").write_text(json.dumps(old))
    assert job.read_job() == Job(str(root), [0], 1, 2, None, 600.0, None)


def test_a_drain_limit_holds_over_all_ranks_of_the_node(job, root, snapshot):
    snapshot(30 * MB, drain_limit=20 * MB, ranks=2)
    drainer, seen, over = Drainer(job), [], threading.Event()

    def look() -> None:
        while not over.wait(0.02):
            seen.append((time.monotonic(), drainer.progress.done))

    watcher = threading.Thread(target=look)
    watcher.start()
    began = time.monotonic()
    assert drainer.tick()
    seconds = time.monotonic() - began
    over.set()
    watcher.join()
    assert 0.85 * 20 < 60 / seconds < 1.15 * 20, f"{60 / seconds:.1f} MB/s"
    for at, done in seen:  # in no second much more than a second's worth: no bursts
        later = [d for t, d in seen if at <= t <= at + 1]
        assert max(later) - done < 1.25 * 20 * MB
    assert_sound(root)


def test_without_a_limit_the_drain_waits_for_nothing(job, root, snapshot):
    snapshot(30 * MB, ranks=2)
    began = time.monotonic()
    assert Drainer(job).tick()
    assert time.monotonic() - began < 3
    assert_sound(root)


def test_a_limit_that_the_job_comes_back_with_holds_for_the_next_drain(job, root, snapshot):
    drainer = Drainer(job)
    snapshot(2 * MB, step=1)
    assert drainer.tick()
    snapshot(2 * MB, drain_limit=1 * MB, step=2)
    began = time.monotonic()
    assert drainer.tick()
    assert 1.5 < time.monotonic() - began < 6
    assert [copy.step for copy in survey(None, PosixStore(root))] == [2, 1]


def test_somebody_who_waits_for_the_end_lifts_the_limit(job, root, snapshot):
    snapshot(4 * MB, drain_limit=1000)  # an hour
    drainer = Drainer(job)
    threading.Timer(0.3, drainer.hurry).start()
    began = time.monotonic()
    assert drainer.tick()
    assert 0.2 < time.monotonic() - began < 10
    assert_sound(root)


def test_an_agent_under_a_low_limit_finishes_its_drain_and_leaves_when_it_is_told_to(job, root, snapshot):
    snapshot(4 * MB, drain_limit=1000)
    process = spawn(job)
    wait_for(lambda: drained(job) or (root / f"{step_dir(1)}.{FIRST.id}.partial").exists())
    time.sleep(0.3)
    assert process.poll() is None and not (root / step_dir(1)).exists()
    process.send_signal(signal.SIGTERM)
    assert process.wait(15) == 0
    assert_sound(root)
    assert list(job.stamps()), "the memory stays"


def test_a_trainer_that_drains_under_a_low_limit_can_be_closed(job, root, snapshot, caplog):
    snapshot(4 * MB, drain_limit=1000)
    keeper = AgentKeeper(job)
    keeper._drain_here("for this test")
    wait_for(lambda: (root / f"{step_dir(1)}.{FIRST.id}.partial").exists())
    began = time.monotonic()
    keeper.close()
    assert time.monotonic() - began < 15
    assert_sound(root)


# -- the last in every queue -----------------------------------------------------------------------------------------


@linux
def test_an_agents_drain_makes_way_and_the_rest_of_it_does_not(job, root, snapshot):
    snapshot(20 * MB, drain_limit=2 * MB)
    process = spawn(job)
    wait_for(lambda: (root / f"{step_dir(1)}.{FIRST.id}.partial").exists())

    def niceness() -> dict[int, int]:
        found = {}
        for task in Path(f"/proc/{process.pid}/task").iterdir():
            found[int(task.name)] = os.getpriority(os.PRIO_PROCESS, int(task.name))
        return found

    wait_for(lambda: len(niceness()) >= 3)
    found = niceness()
    assert process.pid == job.agent(), "ionice has become the agent"
    own = os.getpriority(os.PRIO_PROCESS, 0)
    assert found.pop(process.pid) == own
    assert set(found.values()) == {max(10, own)}, "the one that hashes, and those that write"
    if shutil.which("ionice"):
        for thread in [process.pid, *found]:
            told = subprocess.run(["ionice", "-p", str(thread)], capture_output=True, text=True, check=True).stdout
            assert told.strip() == "best-effort: prio 7"
    process.terminate()
    assert process.wait(15) == 0


@linux
def test_an_agent_starts_where_there_is_no_ionice(job, root, snapshot, monkeypatch, tmp_path):
    snapshot(1 * MB)
    empty = tmp_path / "bin"
    empty.mkdir()
    monkeypatch.setenv("PATH", str(empty))
    process = spawn(job)
    wait_for(lambda: (root / step_dir(1)).exists())
    process.terminate()
    assert process.wait(15) == 0
    assert_sound(root)


@linux
def test_a_thread_of_a_trainer_that_drains_makes_way_too(job, root, snapshot):
    snapshot(20 * MB, drain_limit=4 * MB)
    own = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    keeper = AgentKeeper(job)
    keeper._drain_here("for this test")

    def niceness() -> set[int]:
        names = ("rekindle-drain", "rekindle-write")
        found = [t.native_id for t in threading.enumerate() if t.name.startswith(names) and t.native_id]
        return {os.getpriority(os.PRIO_PROCESS, native) for native in found} if len(found) > 1 else set()

    wait_for(lambda: niceness() == {max(10, own)})
    assert os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) == own
    keeper.close()
    assert_sound(root)
