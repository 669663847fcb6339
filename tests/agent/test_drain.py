"""The agent while it drains: within its budget, behind everybody else, and gone when it is told to go."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import pytest

import rekindle
from rekindle.agent import drain
from rekindle.agent.drain import Drainer
from rekindle.agent.http import send_request
from rekindle.format.lineage import Incarnation, ShardId
from rekindle.format.names import step_dir
from rekindle.memory import starts
from rekindle.memory.asking import Asking
from rekindle.memory.job import JobInfo
from rekindle.memory.job_dir import JobDir, memory_base
from rekindle.memory.slots import Slots
from rekindle.memory.starts import write_starts
from rekindle.session.agent_keeper import AgentKeeper, spawn
from rekindle.storage.catalog import find_copies
from rekindle.storage.posix import PosixStore
from rekindle.storage.throttle import Budget
from rekindle.storage.verify import verify
from tests.conftest import Disk, commit, make_shard
from tests.faults.harness import end_agent, wait_for
from tests.storage.starts import claimed
from tests.storage.starts import start as a_start

FIRST = Incarnation(1, "a" * 16)
SECOND = Incarnation(2, "b" * 16, FIRST.id, 2)
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

        def save(
            nbytes: int,
            drain_limit: int | None = None,
            ranks: int = 1,
            step: int = 1,
            only: int | None = None,
            start: Incarnation = FIRST,
        ) -> None:
            everyone = list(range(ranks))
            job.write_job(JobInfo(str(root), everyone, ranks, 2, None, 600.0, drain_limit))
            for rank in everyone if only is None else [only]:
                stamp = ShardId(step, rank, ranks, start, persist=True)
                receipt, data = make_shard(stamp, {"x": bytes([rank]) * nbytes})
                slots = Slots(job, rank, ranks, everyone)
                stack.callback(slots.close)
                commit(slots, receipt, data)

        yield save


def assert_sound(root: Path, step: int = 1) -> None:
    copies = find_copies(None, PosixStore(root))
    assert [(copy.step, verify(copy)) for copy in copies] == [(step, [])]


def drained(job: JobDir) -> int:
    return int(json.loads(job.paths.agent_status.read_text())["done"]) if job.paths.agent_status.exists() else 0


def keeper_without_agent(job: JobDir, monkeypatch: pytest.MonkeyPatch) -> AgentKeeper:
    """One that finds no agent, because none can be started, and drains itself."""
    info = job.read_job()
    assert info is not None
    monkeypatch.setattr(sys, "executable", "/bin/false")
    keeper = AgentKeeper(job, info, 0.01)
    keeper.check()
    wait_for(lambda: job.agent() == os.getpid())
    return keeper


# -- the claim of the root -----------------------------------------------------------------------------------------


def test_who_drains_keeps_to_the_claim_though_somebody_removes_the_record_of_it(job, root, snapshot):
    write_starts(job, claimed(PosixStore(root), a_start(1)))
    drainer = Drainer(job)
    snapshot(MB)
    assert drainer.tick()
    claimed(PosixStore(root), a_start(2))
    job.paths.starts.unlink()
    snapshot(MB, step=2)
    assert not drainer.tick() and "nothing of this start is written there any more" in str(drainer.progress.error)
    assert_sound(root)


def test_a_record_that_cant_be_read_for_a_moment_lets_nothing_pass(job, root, snapshot, monkeypatch):
    write_starts(job, claimed(PosixStore(root), a_start(1)))
    claimed(PosixStore(root), a_start(2))
    snapshot(MB)
    drainer = Drainer(job)

    def refuse(path):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), str(path))

    with monkeypatch.context() as patch:
        patch.setattr(starts, "read_file", refuse)
        assert not drainer.tick() and "Too many open files" in str(drainer.progress.error)
    assert not PosixStore(root).published()


# -- the job's description -------------------------------------------------------------------------------------------


def test_an_agent_drains_soon_after_a_damaged_description_is_whole_again(job, root, snapshot):
    snapshot(MB)
    drainer, sound = Drainer(job), job.paths.job.read_bytes()
    job.paths.job.write_bytes(b"damaged")
    until = time.monotonic() + 4
    while time.monotonic() < until:
        assert not drainer.tick()
    assert str(drainer.progress.error).startswith(
        "nothing is drained until a trainer of this node has written job.json"
    )
    assert drainer._retry_at - time.monotonic() <= 0.5, "it does not wait longer and longer"
    job.paths.job.write_bytes(sound)
    wait_for(drainer.tick)
    assert drainer.progress.error is None
    assert_sound(root)


# -- storage that refuses --------------------------------------------------------------------------------------------


def test_a_new_wish_ends_the_pause_after_storage_has_refused_and_an_old_one_does_not(job, root, snapshot):
    root.write_text("a file in place of the root")
    snapshot(MB)
    drainer = Drainer(job)
    drainer._delay = 30.0  # as after some attempts
    assert not drainer.tick() and drainer.progress.failures == 1
    root.unlink()
    time.sleep(0.6)
    assert not drainer.tick(), "nobody has asked since"
    snapshot(MB, step=2)
    assert drainer.tick() and drainer.progress.failures == 1
    assert_sound(root, step=2)


def test_many_wishes_do_not_hammer_storage_that_refuses(job, root, snapshot):
    root.write_text("a file in place of the root")
    snapshot(MB)
    drainer, asking = Drainer(job), Asking(job.paths)
    began = time.monotonic()
    while time.monotonic() < began + 2.2:
        asking.ask()
        assert not drainer.tick()
    seconds = time.monotonic() - began
    assert 3 <= drainer.progress.failures <= 1 + seconds / 0.5
    assert drainer._delay <= 1.0, "the pauses begin again"


# -- the budget ------------------------------------------------------------------------------------------------------


def test_a_job_file_of_before_there_were_limits_still_says_what_the_job_is(job, root):
    old = {"root": str(root), "ranks": [0], "world": 1, "keep": 2, "keep_every": None, "idle_timeout": 600.0}
    (job.path / "job.json").write_text(json.dumps(old))
    assert job.read_job() == JobInfo(str(root), [0], 1, 2, None, 600.0, None)


def test_a_drain_limit_holds_over_all_ranks_of_the_node(job, root, snapshot):
    snapshot(30 * MB, drain_limit=20 * MB, ranks=2)
    drainer, taken, clock = Drainer(job), [(1000.0, 0)], [1000.0]

    class Simulated(Budget):
        """On its clock only waiting takes time."""

        def take(self, nbytes: int) -> None:
            super().take(nbytes)
            taken.append((clock[0], taken[-1][1] + nbytes))

    drainer._budget = Simulated(now=lambda: clock[0], wait=lambda seconds: clock.append(clock.pop() + seconds))
    assert drainer.tick()
    seconds = clock[0] - 1000.0
    assert taken[-1][1] >= 60 * MB and 0.85 * 20 < 60 / seconds < 1.15 * 20, f"{60 / seconds:.1f} MB/s"
    for at, done in taken:  # in no second much more than a second's worth: no bursts
        assert max(d for t, d in taken if at <= t <= at + 1) - done < 1.25 * 20 * MB
    assert_sound(root)


def test_without_a_limit_the_drain_waits_for_nothing(job, root, snapshot):
    snapshot(30 * MB, ranks=2)
    drainer, waits = Drainer(job), []
    drainer._budget = Budget(wait=waits.append)
    assert drainer.tick() and not any(waits)
    assert_sound(root)


def test_a_limit_that_the_job_comes_back_with_holds_for_the_next_drain(job, root, snapshot):
    drainer = Drainer(job)
    snapshot(2 * MB, step=1)
    assert drainer.tick()
    snapshot(2 * MB, drain_limit=1 * MB, step=2)
    clock = [1000.0]
    drainer._budget = Budget(now=lambda: clock[0], wait=lambda seconds: clock.append(clock.pop() + seconds))
    assert drainer.tick()
    assert 1.5 < clock[0] - 1000.0 < 2.5
    assert [copy.step for copy in find_copies(None, PosixStore(root))] == [2, 1]


def test_a_limit_that_the_job_comes_back_with_reaches_the_drain_in_hand(job, root, snapshot, monkeypatch):
    monkeypatch.setattr(drain, "_LIMIT_EVERY", 0.0)
    snapshot(20 * MB, drain_limit=1 * MB)
    drainer, clock = Drainer(job), [1000.0]

    def wait(seconds: float) -> None:
        clock.append(clock.pop() + seconds)
        info = job.read_job()
        if clock[0] > 1005 and info.drain_limit == 1 * MB:
            job.write_job(replace(info, drain_limit=100 * MB))

    drainer._budget = Budget(now=lambda: clock[0], wait=wait)
    assert drainer.tick()
    assert 5 < clock[0] - 1000.0 < 7, "not 20"
    assert_sound(root)


def test_somebody_who_waits_for_the_end_lifts_the_limit(job, root, snapshot):
    snapshot(4 * MB, drain_limit=1000)  # an hour
    drainer = Drainer(job)
    threading.Timer(0.3, drainer.hurry).start()
    began = time.monotonic()
    assert drainer.tick()
    assert 0.2 < time.monotonic() - began < 100
    assert_sound(root)


def test_an_agent_under_a_low_limit_finishes_its_drain_and_leaves_when_it_is_told_to(job, root, snapshot):
    snapshot(4 * MB, drain_limit=1000)
    process = spawn(job)
    wait_for(lambda: drained(job) or (root / f"{step_dir(1)}.{FIRST.id}.partial").exists())
    time.sleep(0.3)
    assert process.poll() is None and not (root / step_dir(1)).exists()
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 0
    assert_sound(root)
    assert list(job.snapshots.shard_ids()), "the memory stays"


def test_a_trainer_that_drains_under_a_low_limit_can_be_closed(job, root, snapshot, monkeypatch):
    snapshot(4 * MB, drain_limit=1000)
    keeper = keeper_without_agent(job, monkeypatch)
    wait_for(lambda: (root / f"{step_dir(1)}.{FIRST.id}.partial").exists())
    began = time.monotonic()
    keeper.close()
    assert time.monotonic() - began < 100
    assert_sound(root)


# -- the last in every queue -----------------------------------------------------------------------------------------


@linux
def test_an_agents_drain_makes_way_and_the_rest_of_it_does_not(job, root, snapshot):
    snapshot(20 * MB, drain_limit=MB // 10)  # more than three minutes, until it is told to leave
    info = job.read_job()
    assert info is not None
    keeper = AgentKeeper(job, info)
    keeper.check()
    wait_for(lambda: (root / f"{step_dir(1)}.{FIRST.id}.partial").exists())
    process = keeper._process
    assert process is not None

    def niceness() -> dict[int, int]:
        found = {}
        for task in Path(f"/proc/{process.pid}/task").iterdir():
            with suppress(ProcessLookupError):  # it ends just now
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
    assert process.wait(60) == 0


@linux
def test_an_agent_starts_where_there_is_no_ionice(job, root, snapshot, monkeypatch, tmp_path):
    snapshot(1 * MB)
    empty = tmp_path / "bin"
    empty.mkdir()
    monkeypatch.setenv("PATH", str(empty))
    process = spawn(job)
    wait_for(lambda: (root / step_dir(1)).exists())
    process.terminate()
    assert process.wait(60) == 0
    assert_sound(root)


@linux
def test_a_thread_of_a_trainer_that_drains_makes_way_too(job, root, snapshot, monkeypatch):
    snapshot(20 * MB, drain_limit=MB // 10)
    own = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    keeper = keeper_without_agent(job, monkeypatch)

    def niceness() -> set[int]:
        """Of the threads that drain, while they write."""
        names = ("rekindle-drain", "rekindle-write")
        found = {t.native_id: t.name for t in threading.enumerate() if t.name.startswith(names) and t.native_id}
        with suppress(ProcessLookupError):  # it ends just now
            return {os.getpriority(os.PRIO_PROCESS, i) for i in found if "rekindle-write-0" in found.values()}
        return set()

    wait_for(lambda: niceness() == {max(10, own)})
    assert os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) == own
    keeper.close()
    assert_sound(root)


def test_checkpoints_that_are_out_of_sight_are_an_alarm_and_no_new_root(disk: Disk, memory: Path) -> None:
    """Bytes written to the directory below a mount point are lost by the next mount."""
    root, job = disk.root, JobDir.of(disk.root, memory_base())
    ckpt = rekindle.Checkpointer(root, {"values": rekindle.Values(a=1)}, memory=memory)
    ckpt.save(1, wait="durable")
    disk.unmount()
    for below in (False, True):  # a mount point stays, and is empty
        if below:
            root.mkdir()
        ckpt.save(2 + below)
        wait_for(lambda: "step 1 was there, and nothing is now" in job.notes.drain_error())
        assert not list(root.glob("step-*"))
    root.rmdir()
    disk.mount()
    ckpt.save(4, wait="durable", timeout=60)
    ckpt.close()


def test_a_memory_store_whose_path_is_too_long_for_a_sockets_address(tmp_path: Path, root: Path) -> None:
    memory = tmp_path.joinpath(*["long" * 10] * 4)
    memory.mkdir(parents=True)
    job = JobDir.of(root, memory_base(memory))
    assert len(str(job.paths.agent_socket)) > 150
    ckpt = rekindle.Checkpointer(root, {"values": rekindle.Values(a=1)}, memory=memory)
    with ckpt.guard() as guard:
        assert guard.connected(30)
        ckpt.save(1, wait="durable")
    wait_for(lambda: send_request(job.paths.agent_socket, "GET", "/status")["durable"] == 1)
    ckpt.close()
    wait_for(lambda: not job.path.exists() or not any(job.snapshots.shard_ids()))
    end_agent(job)


# -- what an earlier start has left ----------------------------------------------------------------------------------


@contextmanager
def come_back(job: JobDir, ranks: int, drain_limit: int | None = None) -> Iterator[None]:
    """The job's next start, with so many ranks, all on this node."""
    before, everyone = job.read_job(), list(range(ranks))
    assert before is not None
    locks = [job.lock_rank(rank, 1.0) for rank in everyone]
    job.write_job(replace(before, ranks=everyone, world=ranks, drain_limit=drain_limit))
    job.notes.forget_durable()
    try:
        yield
    finally:
        for lock in locks:
            lock.release()


def in_memory(job: JobDir) -> list[tuple[int, int, int]]:
    """(step, generation, rank) of all snapshots."""
    return sorted((stamp.step, stamp.incarnation.generation, stamp.rank) for stamp, _ in job.snapshots.shard_ids())


def of_rank_1(job: JobDir) -> list[str]:
    names = [path.name for path in job.path.rglob("*") if path.suffix != ".lock"]
    return [name for name in names if name.lstrip(".").startswith(("shard-00001", "rank-00001"))]


def test_what_gone_ranks_saved_last_outlives_the_drain_of_an_older_step_and_is_drained_itself(job, root, snapshot):
    snapshot(1 * MB, drain_limit=1000, ranks=2, step=1)
    drainer = Drainer(job)
    older = threading.Thread(target=drainer.tick)
    older.start()
    wait_for(lambda: drainer.progress.done)
    snapshot(1 * MB, ranks=2, step=2)
    job.paths.local_state_plan(1).write_bytes(b"plan")
    with come_back(job, ranks=1):
        drainer.hurry()
        older.join(60)
        assert drainer.progress.durable == 1
        assert in_memory(job) == [(1, 1, 0), (2, 1, 0), (2, 1, 1)], "what rank 1 had of the durable step is freed"
        assert job.paths.local_state_plan(1).exists()
        assert drainer.tick()
        assert drainer.progress.durable == 2
        assert in_memory(job) == [(1, 1, 0), (2, 1, 0)]
        assert of_rank_1(job) == []
    copies = find_copies(None, PosixStore(root))
    assert [(copy.step, copy.world, verify(copy)) for copy in copies] == [(2, 2, []), (1, 2, [])]


def test_what_gone_ranks_saved_and_cannot_be_drained_is_freed_by_the_new_starts_own_checkpoint(job, snapshot):
    snapshot(1 * MB, ranks=2, step=1)
    snapshot(1 * MB, ranks=2, step=2)
    snapshot(1 * MB, ranks=2, step=3, only=1)
    (job.paths.slots / "rank-00001-7.slot").write_bytes(b"free")
    drainer = Drainer(job)
    with come_back(job, ranks=1):
        assert drainer.tick() or drainer.tick()  # what is there of step 3 waits for the rest of it
        assert drainer.progress.durable == 2
        assert (3, 1, 1) in in_memory(job) and (2, 1, 1) not in in_memory(job)
        assert not (job.paths.slots / "rank-00001-7.slot").exists()
        snapshot(1 * MB, step=3, start=SECOND)
        assert drainer.tick()
        assert (3, 2, 0) in in_memory(job)
        assert of_rank_1(job) == []


def test_a_step_that_an_older_start_drained_too_is_drained_again_and_nobody_is_told_to_end(job, root, snapshot):
    snapshot(1 * MB, drain_limit=1000, step=2)
    drainer = Drainer(job)
    older = threading.Thread(target=drainer.tick)
    older.start()
    wait_for(lambda: drainer.progress.done)
    with come_back(job, ranks=1):
        snapshot(1 * MB, step=2, start=SECOND)
        drainer.hurry()
        older.join(60)
        assert PosixStore(root).durable(ShardId(2, 0, 1, FIRST))
        assert drainer.pending() == 2
        assert drainer.tick()
        assert drainer.progress.error is None
        assert PosixStore(root).durable(ShardId(2, 0, 1, SECOND))
        assert drainer.pending() is None


def test_a_start_that_went_on_elsewhere_is_told_of(job, root, snapshot):
    snapshot(1 * MB, step=2, start=SECOND)
    assert Drainer(job).tick()
    shutil.rmtree(job.path / step_dir(2))
    for start in (FIRST, Incarnation(2, "c" * 16, FIRST.id, 2)):
        with come_back(job, ranks=1):
            snapshot(1 * MB, step=3, start=start)
            drainer = Drainer(job)
            assert not drainer.tick()
            assert "another start of this job, generation 2, writes there" in str(drainer.progress.error)
        shutil.rmtree(job.path / step_dir(3))
    assert_sound(root, 2)
