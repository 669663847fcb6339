"""Compile caches on their way to storage: what has settled, once, behind the drain, and never at its expense."""

from __future__ import annotations

import fcntl
import logging
import os
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from rekindle.agent import compile_carrier
from rekindle.agent.compile_carrier import CompileCarrier
from rekindle.format.lineage import Incarnation, ShardId
from rekindle.memory.compile_dir import CompileDir
from rekindle.memory.job import JobInfo
from rekindle.memory.job_dir import JobDir, memory_base
from rekindle.memory.slots import Slots
from rekindle.session.agent_keeper import spawn
from rekindle.storage.packs import Packs
from rekindle.storage.throttle import Budget
from tests.conftest import commit, make_shard
from tests.faults.harness import wait_for

CHAIN = "torch-1"
MB = 1 << 20


@pytest.fixture
def info(root: Path) -> JobInfo:
    return JobInfo(str(root), [0], 1, 2, None, 600.0, None)


@pytest.fixture
def job(memory: Path, root: Path, info: JobInfo) -> JobDir:
    """A job that has a checkpoint on storage."""
    root.mkdir()
    job = JobDir.of(root, memory_base())
    job.create()
    job.write_job(info)
    job.notes.write_durable(1)
    return job


@pytest.fixture
def directory(job: JobDir) -> CompileDir:
    directory = CompileDir.beside(job)
    os.close(directory.use(CHAIN))
    return directory


@pytest.fixture
def carrier(job: JobDir, monkeypatch: pytest.MonkeyPatch) -> CompileCarrier:
    """One whose looks follow each other at once."""
    monkeypatch.setattr(compile_carrier, "_LOOK_EVERY", 0.0)
    monkeypatch.setattr(compile_carrier, "_LOOK_SHARE", 0)
    return CompileCarrier(job, Budget())


def carried(root: Path, toolchain: str = CHAIN) -> dict[str, bytes | None]:
    store = Packs(root, toolchain)
    return {entry.path: data for pack in reversed(store.list()) for entry, data in store.read(pack)}


def test_what_two_looks_find_unchanged_is_carried_once(carrier, directory, root):
    directory.put(CHAIN, "inductor/a", b"first")
    directory.put(CHAIN, "triton/b", b"")
    assert not carrier.tick(), "it has not settled"
    assert carrier.tick()
    assert carried(root) == {"inductor/a": b"first", "triton/b": b""}
    directory.put(CHAIN, "inductor/c", b"later")
    assert [carrier.tick() for _ in range(6)].count(True) == 1
    assert carried(root) == {"inductor/a": b"first", "triton/b": b"", "inductor/c": b"later"}
    assert len(Packs(root, CHAIN).list()) == 2


def test_a_file_that_is_being_written_waits(carrier, directory, root):
    path = directory.path / CHAIN / "inductor" / "a"
    for number in range(4):
        directory.put(CHAIN, "inductor/a", b"x" * number)
        assert not carrier.tick()
    assert path.exists() and carried(root) == {}
    assert carrier.tick()


def test_nothing_is_carried_while_a_compiler_is_at_work(carrier, directory, root):
    directory.put(CHAIN, "inductor/a", b"x")
    directory.put(CHAIN, "inductor/locks/key.lock", b"")
    with open(directory.path / CHAIN / "inductor/locks/key.lock") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert not any(carrier.tick() for _ in range(4))
    assert any(carrier.tick() for _ in range(2))
    assert list(carried(root)) == ["inductor/a"]


def test_a_successor_and_another_node_carry_what_is_missing(carrier, directory, root, job):
    directory.put(CHAIN, "inductor/a", b"x")
    Packs(root, CHAIN).write([("inductor/a", b"another node's"), ("inductor/b", b"y")])
    directory.put(CHAIN, "inductor/c", b"z")
    assert any([carrier.tick() for _ in range(4)])
    assert carried(root) == {"inductor/a": b"another node's", "inductor/b": b"y", "inductor/c": b"z"}
    successor = CompileCarrier(job, Budget())
    assert not any([successor.tick() for _ in range(4)]), "all that it must know is on storage"


def test_what_a_new_start_has_removed_is_carried_again(carrier, directory, root, job, info):
    directory.put(CHAIN, "inductor/a", b"x")
    directory.put(CHAIN, "inductor/b", b"y")
    assert any([carrier.tick() for _ in range(3)])
    for path in (root / "compile" / CHAIN).iterdir():
        path.unlink()
    assert not any([carrier.tick() for _ in range(3)])
    job.write_job(replace(info, start="b" * 16))
    assert any([carrier.tick() for _ in range(3)])
    assert carried(root) == {"inductor/a": b"x", "inductor/b": b"y"}


def test_files_that_are_written_again_are_carried_again(carrier, directory, root):
    for cache in ("cuda", "inductor"):
        directory.put(CHAIN, f"{cache}/index", b"old")
    assert any([carrier.tick() for _ in range(3)])
    for cache in ("cuda", "inductor"):
        (directory.path / CHAIN / cache / "index").write_bytes(b"newer")
    assert any([carrier.tick() for _ in range(3)])
    assert not any([carrier.tick() for _ in range(3)])
    assert carried(root) == {"cuda/index": b"newer", "inductor/index": b"old"}


def test_a_pack_at_a_time_so_that_a_drain_waits_for_no_more(carrier, directory, root):
    for number in range(5):
        directory.put(CHAIN, f"inductor/{number}", bytes([number]) * (5 * MB))
    assert not carrier.tick()
    assert [carrier.tick() for _ in range(4)] == [True, True, True, False]
    assert len(carried(root)) == 5
    assert max(pack.nbytes for pack in Packs(root, CHAIN).list()) <= 10 * MB


def test_bytes_count_against_the_limit_of_the_drain(job, directory, monkeypatch):
    monkeypatch.setattr(compile_carrier, "_LOOK_EVERY", 0.0)
    monkeypatch.setattr(compile_carrier, "_LOOK_SHARE", 0)
    waits: list[float] = []
    budget = Budget(MB, now=lambda: 0.0, wait=waits.append)
    carrier = CompileCarrier(job, budget)
    directory.put(CHAIN, "inductor/a", bytes(3 * MB))
    assert any([carrier.tick() for _ in range(3)])
    budget.take(1)
    assert waits[-1] > 2.5


def test_a_root_in_which_nothing_is_yet_gets_nothing(carrier, directory, root, job):
    job.notes.forget_durable()
    directory.put(CHAIN, "inductor/a", b"x")
    assert not any(carrier.tick() for _ in range(4))
    assert not (root / "compile").exists(), "it may not be mounted"


def test_storage_that_refuses_costs_one_line(carrier, directory, root, caplog, monkeypatch):
    (root / "compile").mkdir(mode=0o755)
    directory.put(CHAIN, "inductor/a", b"x")
    monkeypatch.setattr(compile_carrier, "_RETRY_AFTER", 0.0)
    with caplog.at_level(logging.WARNING):
        assert not any(carrier.tick() for _ in range(5))
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith("compile caches are not carried to storage") and "is open to others (mode 755)" in line
    (root / "compile").chmod(0o700)
    assert any([carrier.tick() for _ in range(3)]), "it was not given up"


def test_storage_that_refuses_is_left_alone_for_a_while(carrier, directory, root):
    (root / "compile").touch()
    directory.put(CHAIN, "inductor/a", b"x")
    assert not any(carrier.tick() for _ in range(5))
    (root / "compile").unlink()
    assert not any(carrier.tick() for _ in range(5))


def test_the_end_of_a_job_carries_what_has_not_settled(carrier, directory, root, info):
    directory.put(CHAIN, "inductor/a", b"x")
    assert carrier.finish(info)
    assert list(carried(root)) == ["inductor/a"]


def test_memory_is_given_back_once_the_job_and_its_launcher_are_gone(carrier, directory, job):
    used = directory.use(CHAIN)
    carrier.leave()
    assert directory.path.exists(), "the job's own memory is still there"
    assert job.remove()
    leaving = threading.Thread(target=carrier.leave)
    leaving.start()
    leaving.join(3 * compile_carrier._POLL)
    assert directory.path.exists() and leaving.is_alive()
    os.close(used)
    leaving.join(60)
    assert not directory.path.exists()


def test_several_nodes_do_not_begin_at_once(job, directory, root, monkeypatch):
    monkeypatch.setattr(compile_carrier, "_LOOK_EVERY", 0.0)
    monkeypatch.setattr(compile_carrier, "_LOOK_SHARE", 0)
    job.write_job(JobInfo(str(root), [0], 2, 2, None, 600.0, None))
    directory.put(CHAIN, "inductor/a", b"x")
    waits = []
    for _ in range(20):
        carrier = CompileCarrier(job, Budget())
        carrier.tick()
        waits.append(carrier._spread)
    assert max(waits) - min(waits) > 0.2 * compile_carrier._SPREAD
    assert carried(root) == {}


def test_an_agent_carries_behind_its_drain_and_takes_memory_along(
    job: JobDir, directory: CompileDir, root: Path, shard_of: Callable[..., object]
) -> None:
    """The process itself: the job ends at once, with nothing settled."""
    job.notes.forget_durable()
    job.write_job(JobInfo(str(root), [0], 1, 2, None, 1.0, None))
    receipt, data = make_shard(ShardId(1, 0, 1, Incarnation(1, "a" * 16), persist=True), {"x": b"y" * 100})
    slots = Slots(job, 0, 1, [0])
    commit(slots, receipt, data)
    slots.close()
    directory.put(CHAIN, "inductor/a", b"x")
    spawn(job)
    wait_for(lambda: not job.path.exists(), 60)
    assert list(carried(root)) == ["inductor/a"]
    wait_for(lambda: not directory.path.exists(), 60)
