"""A job's directory: whom it belongs to, who is in it, and locks that only the living hold."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from concurrent.futures import wait
from contextlib import contextmanager
from pathlib import Path

import pytest

from rekindle.common.timeouts import in_background
from rekindle.errors import BusyError, FormatError, MemoryStoreError
from rekindle.format.lineage import Incarnation, ShardId
from rekindle.format.names import job_name, receipt_name, shard_name, step_dir
from rekindle.memory.files_dir import FilesDir
from rekindle.memory.job import JobInfo
from rekindle.memory.job_dir import JobDir, memory_base
from rekindle.memory.lock import Lock

HOLD = """
import sys, time
from pathlib import Path
from rekindle.memory.lock import Lock
lock = Lock(Path(sys.argv[1]))
assert lock.acquire()
print("held", flush=True)
time.sleep(120)
"""

HOLD_AND_FORK = """
import os, sys, time
from pathlib import Path
from rekindle.memory.lock import Lock
lock = Lock(Path(sys.argv[1]))
assert lock.acquire()
child = os.fork()
if child == 0:
    print("child", os.getpid(), flush=True)
time.sleep(120)
"""


@contextmanager
def process(code: str, *args: object):
    """A real process; its first line of output has been read."""
    running = subprocess.Popen([sys.executable, "-c", code, *map(str, args)], stdout=subprocess.PIPE, text=True)
    try:
        running.first_line = running.stdout.readline()
        yield running
    finally:
        running.kill()
        running.wait()
        running.stdout.close()


@pytest.fixture
def job(memory: Path, root: Path) -> JobDir:
    return JobDir.of(root, memory_base())


# -- whom the directory belongs to -----------------------------------------------------------------------------------


def test_the_base_is_a_directory_of_this_user(memory):
    assert memory_base() == memory / f"rekindle-{os.getuid()}"
    assert memory_base("/elsewhere") == Path(f"/elsewhere/rekindle-{os.getuid()}")


def test_without_a_word_memory_is_tmpfs_where_there_is_one(monkeypatch):
    monkeypatch.delenv("REKINDLE_MEMORY", raising=False)
    if os.path.isdir("/dev/shm"):
        assert memory_base() == Path(f"/dev/shm/rekindle-{os.getuid()}")


def test_what_is_made_is_ours_alone(job):
    job.create()
    for path in (job.path.parent, job.path, job.paths.slots):
        assert path.is_dir() and path.stat().st_mode & 0o777 == 0o700
    job.create()  # again, by the next rank
    job.check()


def test_an_open_umask_does_not_open_the_directory(job):
    before = os.umask(0)
    try:
        job.create()
    finally:
        os.umask(before)
    assert job.path.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("part", ["parent", "path", "slots"])
def test_a_symbolic_link_is_refused(job, tmp_path, part):
    target = tmp_path / "trap"
    target.mkdir(mode=0o700)
    place = {"parent": job.path.parent, "path": job.path, "slots": job.paths.slots}[part]
    for above in reversed(place.relative_to(job.path.parent.parent).parents[:-1]):
        (job.path.parent.parent / above).mkdir(mode=0o700, exist_ok=True)
    place.symlink_to(target)
    with pytest.raises(MemoryStoreError, match="is not a directory"):
        job.create()
    assert not list(target.iterdir())


def test_a_plain_file_in_the_way_is_refused(job):
    job.path.parent.write_text("")
    with pytest.raises(MemoryStoreError, match="is not a directory"):
        job.create()
    with pytest.raises(MemoryStoreError, match="is not a directory"):
        job.check()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a directory to somebody else")
@pytest.mark.parametrize("part", ["parent", "path"])
def test_somebody_elses_directory_is_refused_and_the_owner_named(job, part):
    place = {"parent": job.path.parent, "path": job.path}[part]
    job.create()
    os.chown(place, 12345, -1)
    with pytest.raises(MemoryStoreError, match="belongs to user 12345"):
        job.create()
    if part == "parent":
        with pytest.raises(MemoryStoreError, match="belongs to user 12345"):
            job.check()


@pytest.mark.parametrize("mode", [0o777, 0o750, 0o701, 0o1777])
def test_a_directory_that_others_may_enter_is_refused(job, mode):
    job.create()
    job.path.parent.chmod(mode)
    with pytest.raises(MemoryStoreError, match="open to others"):
        job.create()
    with pytest.raises(MemoryStoreError, match="open to others"):
        job.check()


def test_a_base_that_can_not_be_made_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(MemoryStoreError, match="file"):
        JobDir.of(Path("/some/root"), memory_base(tmp_path / "file" / "below")).create()


def test_a_memory_error_can_be_caught_as_the_built_in(job):
    job.path.parent.write_text("")
    with pytest.raises(OSError):
        job.create()


def test_jobs_of_different_roots_do_not_meet():
    names = {job_name(Path(root)) for root in ("/a/run", "/b/run", "/a/run/", "/a/Run", "/" + "x" * 300, "/")}
    assert len(names) == 5  # the trailing slash is no difference
    assert all(len(name) <= 40 for name in names)


# -- who is there ----------------------------------------------------------------------------------------------------


def test_a_second_process_can_not_take_a_held_lock(tmp_path):
    path = tmp_path / "rank.lock"
    with process(HOLD, path) as holder:
        assert holder.first_line == "held\n"
        assert Lock.holder(path) == holder.pid
        assert not Lock(path).acquire(0.05)


def test_a_killed_holder_frees_its_lock(tmp_path):
    path = tmp_path / "rank.lock"
    with process(HOLD, path) as holder:
        holder.send_signal(signal.SIGKILL)
        holder.wait()
        assert Lock.holder(path) is None
        lock = Lock(path)
        assert lock.acquire()
        assert Lock.holder(path) == os.getpid()
        lock.release()


def test_a_forked_child_does_not_keep_its_dead_parents_lock(tmp_path):
    """A data loader's worker outlives a killed trainer for a while."""
    path = tmp_path / "rank.lock"
    with process(HOLD_AND_FORK, path) as parent:
        child = int(parent.first_line.split()[1])
        try:
            assert Lock.holder(path) == parent.pid
            parent.send_signal(signal.SIGKILL)
            parent.wait()
            os.kill(child, 0)  # it lives
            lock = Lock(path)
            assert lock.acquire(5.0)
            lock.release()
        finally:
            os.kill(child, signal.SIGKILL)


def test_a_lock_can_be_released_and_taken_again(tmp_path):
    path = tmp_path / "rank.lock"
    first, second = Lock(path), Lock(path)
    assert first.acquire() and not second.acquire()
    first.release()
    first.release()
    assert second.acquire() and Lock.holder(path) == os.getpid()
    second.release()
    assert Lock.holder(path) is None
    assert Lock.holder(tmp_path / "never") is None


def test_a_lock_that_goes_with_the_interpreter_is_released_though_its_modules_names_have_gone(tmp_path, monkeypatch):
    lock = Lock(tmp_path / "rank.lock")
    assert lock.acquire()
    with monkeypatch.context() as patch:
        patch.setattr("rekindle.memory.lock.os", None)
        lock.release()
    assert Lock.holder(tmp_path / "rank.lock") is None


def test_a_waiter_does_not_get_a_lock_whose_file_was_removed(tmp_path):
    path = tmp_path / "rank.lock"
    held = Lock(path)
    assert held.acquire()
    path.unlink()
    fresh = Lock(path)
    assert fresh.acquire()  # a new file, so a new lock
    assert Lock.holder(path) == os.getpid()
    held.release()
    assert Lock.holder(path) == os.getpid()
    fresh.release()


def test_a_rank_is_trained_by_one_process(job):
    job.create()
    with process(HOLD, job.paths.rank_lock(3)) as holder:
        assert job.trainers() == {3: holder.pid}
        with pytest.raises(BusyError, match=str(holder.pid)):
            job.lock_rank(3, 0.05)
        other = job.lock_rank(4, 0.0)
        assert job.trainers() == {3: holder.pid, 4: os.getpid()}
        other.release()
    assert job.trainers() == {}


# -- what is in it ---------------------------------------------------------------------------------------------------


def test_the_job_is_what_was_written(job):
    job.create()
    assert job.read_job() is None
    wanted = JobInfo("/root", [0, 1], 4, 2, None, 900.0)
    job.write_job(wanted)
    assert job.read_job() == wanted
    (job.path / "job.json").write_text("{}")
    with pytest.raises(FormatError, match=r"job\.json"):
        job.read_job()


def test_the_durable_step_is_remembered(job):
    job.create()
    assert job.notes.durable() is None
    job.notes.write_durable(41)
    job.notes.write_durable(42)
    assert job.notes.durable() == 42
    assert not list(job.path.glob(".*.tmp"))


def test_the_durable_step_is_remembered_in_full_memory_too(small_tmpfs, root):
    """What is noted there is what the next start goes by, should storage be away then."""
    job = JobDir.of(root, memory_base(small_tmpfs(1 << 20)))
    job.create()
    job.notes.write_durable(9)
    with pytest.raises(OSError, match="No space left"), open(job.path / "in the way", "wb", buffering=0) as file:
        while file.write(bytes(1 << 12)):
            pass
    for step in (10, 9):
        job.notes.write_durable(step)
        assert job.notes.durable() == step
    assert not list(job.path.glob(".*.tmp"))


def put(job: JobDir, shard_of, step: int, rank: int = 0, world: int = 1) -> Path:
    """A snapshot, by hand."""
    stamp = ShardId(step, rank, world, Incarnation(1, "a" * 16))
    receipt, data = shard_of(stamp, {"x": b"%d" % step})
    directory = job.path / step_dir(step)
    directory.mkdir(exist_ok=True)
    (directory / shard_name(rank, world)).write_bytes(data)
    (directory / receipt_name(rank, world)).write_bytes(receipt.raw)
    return directory / receipt_name(rank, world)


def test_damaged_and_foreign_files_are_not_taken_for_snapshots(job, shard_of):
    assert list(job.snapshots.shard_ids()) == []
    job.create()
    good = put(job, shard_of, 1)
    put(job, shard_of, 2).write_bytes(b"\0" * 100)
    (job.path / "step-0000000003").mkdir()
    (job.path / "step-0000000003" / "notes.json").write_text("{}")
    (job.path / "step-4").mkdir()
    assert [(stamp.step, path) for stamp, path in job.snapshots.shard_ids()] == [(1, good)]


def test_one_ranks_snapshots_can_be_removed_alone(job, shard_of):
    job.create()
    for step in (1, 2):
        for rank in (0, 1):
            put(job, shard_of, step, rank, 2)
    (job.paths.slots / "rank-00001-7.slot").write_bytes(b"x")
    job.snapshots.remove(1)
    assert sorted((stamp.step, stamp.rank) for stamp, _ in job.snapshots.shard_ids()) == [(1, 0), (2, 0)]
    assert not list(job.paths.slots.iterdir())
    job.snapshots.remove()
    assert list(job.snapshots.shard_ids()) == [] and not list(job.path.glob("step-*"))


def test_a_job_is_not_removed_under_a_trainer(job, shard_of):
    job.create()
    put(job, shard_of, 1)
    with process(HOLD, job.paths.rank_lock(0)):
        assert not job.remove()
        assert [stamp.step for stamp, _ in job.snapshots.shard_ids()] == [1]
    assert job.remove()
    assert not job.path.exists()
    assert job.remove()


@pytest.mark.parametrize("kind", [JobDir, FilesDir])
def test_notes_that_an_agent_writes_meanwhile_are_removed_too(tmp_path, monkeypatch, kind):
    memory = kind(tmp_path / "rekindle" / "job")
    memory.create()
    (memory.path / "common").write_text("a note")
    written, rmdir = [], os.rmdir

    def write_then_rmdir(path, *args, **names):
        if not written and str(path).endswith(memory.path.name):
            written.append(path)
            (memory.path / "common").write_text("a later note")
        rmdir(path, *args, **names)

    monkeypatch.setattr(os, "rmdir", write_then_rmdir)
    assert memory.remove()
    assert written and not memory.path.exists()


@pytest.mark.parametrize(
    ("kind", "join"), [(JobDir, lambda job: job.lock_rank(0, 10.0)), (FilesDir, lambda files: files.join())]
)
def test_a_start_that_comes_while_memory_is_given_back_makes_it_anew(tmp_path, monkeypatch, kind, join):
    memory = kind(tmp_path / "rekindle" / "job")
    mkdir, removals = os.mkdir, []

    def remove_and_mkdir(path, *args, **names):
        if Path(path).name == "slots" and not removals:
            removals.append(in_background(memory.remove, "removes"))
            wait(removals, 0.2)
        mkdir(path, *args, **names)

    monkeypatch.setattr(os, "mkdir", remove_and_mkdir)
    lock = join(memory)
    assert lock.held() and memory.paths.slots.is_dir()
    assert removals[0].result(10) is False, "somebody has joined"
    lock.release()
    assert memory.remove()


def test_held_and_free_bytes_are_those_of_the_file_system(job):
    job.create()
    before = job.held_bytes()
    (job.paths.slots / "rank-00000-1.slot").write_bytes(b"x" * 100_000)
    assert 100_000 <= job.held_bytes() - before <= 200_000
    assert 0 < job.free_bytes() <= os.statvfs(job.path).f_blocks * os.statvfs(job.path).f_frsize
