"""Compile caches on their way to storage: what has settled, once, behind the drain, and never at its expense."""

from __future__ import annotations

import logging
import math
import os
import time
from dataclasses import replace
from pathlib import Path

import pytest

from rekindle.agent import compile_carrier
from rekindle.agent.compile_carrier import CompileCarrier
from rekindle.agent.drain import Drainer
from rekindle.format.lineage import Incarnation, ShardId
from rekindle.memory.compile_dir import CompileDir
from rekindle.memory.job import JobInfo
from rekindle.memory.job_dir import JobDir, memory_base
from rekindle.memory.slots import Slots
from rekindle.session.agent_keeper import spawn
from rekindle.storage.packs import Packs
from rekindle.storage.private import _InDirectory
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
    return CompileCarrier(job)


def put(directory: CompileDir, path: str, data: bytes, age: float = 60.0) -> None:
    """Write an entry that has not changed for a while."""
    directory.put(CHAIN, path, data)
    when = time.time() - age
    os.utime(directory.path / CHAIN / path, (when, when))


def carried(root: Path, toolchain: str = CHAIN) -> dict[str, bytes | None]:
    store = Packs(root, toolchain)
    return {entry.path: data for pack in reversed(store.list()) for entry, data in store.read(pack)}


def packs(root: Path) -> int:
    return len(Packs(root, CHAIN).list())


def test_an_entry_is_carried_once(carrier, directory, root):
    put(directory, "inductor/a", b"first")
    put(directory, "triton/b", b"")
    carrier.tick()
    assert carried(root) == {"inductor/a": b"first", "triton/b": b""}
    put(directory, "inductor/c", b"later")
    for _ in range(3):
        carrier.tick()
    assert carried(root) == {"inductor/a": b"first", "triton/b": b"", "inductor/c": b"later"}
    assert packs(root) == 2


def test_a_file_that_is_being_written_waits(carrier, directory, root):
    put(directory, "inductor/a", b"x", age=0.0)
    put(directory, "inductor/b", b"y")
    carrier.tick()
    assert carried(root) == {"inductor/b": b"y"}
    put(directory, "inductor/a", b"whole")
    carrier.tick()
    assert carried(root) == {"inductor/a": b"whole", "inductor/b": b"y"}


def test_a_library_in_pieces_is_not_carried(carrier, directory, root):
    put(directory, "inductor/a.so", b"\x7fELF\x02 and no more")
    put(directory, "inductor/b", b"y")
    carrier.tick()
    assert list(carried(root)) == ["inductor/b"]


def test_what_other_nodes_and_agents_have_carried_is_left_to_them(carrier, directory, root, job):
    put(directory, "inductor/a", b"x")
    Packs(root, CHAIN).write({"inductor/a": b"another node's", "inductor/b": b"y"})
    put(directory, "inductor/c", b"z")
    carrier.tick()
    assert carried(root) == {"inductor/a": b"another node's", "inductor/b": b"y", "inductor/c": b"z"}
    CompileCarrier(job).tick()
    assert packs(root) == 2, "all that a successor must know is on storage"


def test_a_successor_carries_what_was_removed_as_damaged(carrier, directory, root, job):
    put(directory, "inductor/a", b"x")
    carrier.tick()
    for path in (root / "compile" / CHAIN).iterdir():
        path.unlink()
    CompileCarrier(job).tick()
    assert carried(root) == {"inductor/a": b"x"}


def test_a_file_that_is_written_again_is_carried_again(carrier, directory, root):
    put(directory, "cuda/index", b"old")
    carrier.tick()
    for path in (root / "compile" / CHAIN).iterdir():
        os.utime(path, (1, 1))  # the newest counts, and file systems may count whole seconds
    put(directory, "cuda/index", b"newer")
    carrier.tick()
    assert carried(root) == {"cuda/index": b"newer"}


def test_entries_of_another_toolchain_are_carried_to_its_folder(carrier, directory, root):
    put(directory, "inductor/a", b"x")
    carrier.tick()
    os.close(directory.use("torch-2"))
    directory.put("torch-2", "inductor/a", b"y")
    os.utime(directory.path / "torch-2" / "inductor" / "a", (1, 1))
    carrier.tick()
    assert (carried(root), carried(root, "torch-2")) == ({"inductor/a": b"x"}, {"inductor/a": b"y"})


def test_a_pack_at_a_time_so_that_a_drain_waits_for_no_more(carrier, directory, root):
    for number in range(5):
        put(directory, f"inductor/{number}", bytes([number]) * (5 * MB))
    for count in (2, 4, 5, 5):
        carrier.tick()
        assert len(carried(root)) == count
    assert max(pack.nbytes for pack in Packs(root, CHAIN).list()) <= 10 * MB


def test_a_pack_of_many_small_files_has_an_index_that_is_read(carrier, directory, root, monkeypatch):
    monkeypatch.setattr(compile_carrier, "PACK_ENTRIES", 3)
    for number in range(5):
        put(directory, f"inductor/{number}", b"")
    for count in (3, 5, 5):
        carrier.tick()
        assert len(carried(root)) == count


def test_the_drain_s_limit_of_bytes_per_second_holds_between_packs(carrier, directory, root, job, info):
    job.write_job(replace(info, drain_limit=MB))
    for number in range(2):
        put(directory, f"inductor/{number}", bytes([number]) * (10 * MB))
    for _ in range(3):
        carrier.tick()
    assert packs(root) == 1, "the next one in ten seconds"
    carrier.finish(math.inf)
    assert packs(root) == 2, "the node may go"


def test_a_root_in_which_nothing_is_yet_gets_nothing(carrier, directory, root, job):
    job.notes.forget_durable()
    put(directory, "inductor/a", b"x")
    carrier.tick()
    assert not (root / "compile").exists(), "it may not be mounted"


def test_storage_that_refuses_costs_one_line(carrier, directory, root, caplog, monkeypatch):
    (root / "compile").mkdir(mode=0o755)
    put(directory, "inductor/a", b"x")
    monkeypatch.setattr(compile_carrier, "_RETRY_AFTER", 0.0)
    with caplog.at_level(logging.WARNING):
        for _ in range(5):
            carrier.tick()
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith("compile caches are not on storage") and "is open to others (mode 755)" in line
    (root / "compile").chmod(0o700)
    carrier.tick()
    assert carried(root) == {"inductor/a": b"x"}, "it was not given up"


def test_storage_that_refuses_to_write_gets_the_entries_later(carrier, directory, root, monkeypatch):
    put(directory, "inductor/a", b"x")
    monkeypatch.setattr(compile_carrier, "_RETRY_AFTER", 0.0)
    with monkeypatch.context() as patch:
        patch.setattr(Packs, "write", _refuse)
        carrier.tick()
    assert carried(root) == {}
    carrier.tick()
    assert carried(root) == {"inductor/a": b"x"}


def _refuse(*_: object) -> None:
    raise OSError("no room")


def test_storage_that_refuses_is_left_alone_for_a_while(carrier, directory, root):
    (root / "compile").touch()
    put(directory, "inductor/a", b"x")
    carrier.tick()
    (root / "compile").unlink()
    carrier.tick()
    assert not (root / "compile").exists()


def test_the_end_of_a_job_carries_what_has_not_settled(carrier, directory, root):
    for name in "ab":
        put(directory, f"inductor/{name}", bytes(9 * MB), age=0.0)
    carrier.finish(time.monotonic())
    assert not carried(root), "whoever ends the job has waited long enough"
    carrier.finish(math.inf)
    assert sorted(carried(root)) == ["inductor/a", "inductor/b"]


def test_several_nodes_do_not_begin_at_once(job, directory, root):
    put(directory, "inductor/a", b"x")
    begin = [CompileCarrier(job)._look_at for _ in range(20)]
    assert max(begin) - min(begin) > 0.2 * compile_carrier._LOOK_EVERY


def test_the_drain_carries_when_it_has_nothing_else_to_do(job, directory, root, monkeypatch):
    monkeypatch.setattr(compile_carrier, "_LOOK_EVERY", 0.0)
    drainer = Drainer(job)
    put(directory, "inductor/a", b"x")
    asked = []
    plain = Packs.write
    monkeypatch.setattr(
        Packs, "write", lambda self, files: (asked.append(drainer.progress.moved), plain(self, files))[1]
    )
    drainer.tick()
    assert carried(root) == {"inductor/a": b"x"}
    assert asked != [None], "storage that hangs is noticed"
    assert drainer.progress.moved is None


def test_storage_that_answers_slowly_is_not_taken_for_one_that_hangs(job, directory, root, monkeypatch):
    for number in range(3):
        Packs(root, CHAIN).write({f"inductor/other{number}": b"x"})
    monkeypatch.setattr(compile_carrier, "_LOOK_EVERY", 0.0)
    drainer = Drainer(job)
    put(directory, "inductor/a", b"x")
    waited_since = []
    for name in ("list", "read", "write"):
        plain = getattr(_InDirectory, name)

        def slow(self, *arguments, plain=plain):
            waited_since.append(drainer.progress.moved)
            return plain(self, *arguments)

        monkeypatch.setattr(_InDirectory, name, slow)
    drainer.tick()
    assert len(waited_since) == 7, "a list, three indexes, a pack and its index, a list"
    assert len(set(waited_since)) == 7


def test_an_agent_carries_behind_its_drain_and_takes_memory_along(
    job: JobDir, directory: CompileDir, root: Path
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
