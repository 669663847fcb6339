"""Memory that is made in the background: nobody waits for it who must not, and whoever waits gets it made at once."""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import resource
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from rekindle.errors import MemoryStoreError
from rekindle.format.lineage import ShardId
from rekindle.memory import pages
from rekindle.memory.job_dir import JobDir, memory_base
from rekindle.memory.maker import SlotMaker
from rekindle.memory.pages import AT_ONCE, Pages
from rekindle.memory.slots import NotReadyError, Slots
from rekindle.storage.verify import verify_shard
from tests.conftest import make_shard
from tests.memory.gate import Gate
from tests.memory.page_locks import Lock
from tests.memory.saved import (
    FIRST,
    alone,
    assert_sound,
    files,
    open_step,
    run_until_killed,
    save,
    steps,
    successor_of,
)

LARGE = AT_ONCE + 4096
"""Bytes of a snapshot whose memory is not made inside of ``step()``."""
SECONDS = 60.0


def commit(slots: Slots, step: int, nbytes: int = LARGE, *, wait: bool = False, persist: bool = True) -> None:
    """A save of ``nbytes`` bytes."""
    slot = slots.acquire(step, FIRST, nbytes, wait=wait)
    assert slot.size >= nbytes and slot.map is not None and len(slot.map) >= nbytes
    assert slot.held >= nbytes, "no holes, at which a write would kill the process"
    stamp = ShardId(step, slots.rank, slots.world, FIRST, persist)
    receipt, data = make_shard(stamp, {"x": bytes(nbytes - 4096)})
    assert len(data) == nbytes
    slot.map[:nbytes] = data
    slots.commit(slot, stamp, receipt.raw)


def not_ready(slots: Slots, step: int, nbytes: int = LARGE) -> bool:
    try:
        slots.acquire(step, FIRST, nbytes, wait=False).unlock()
    except NotReadyError:
        return True
    return False


def test_a_step_does_not_wait_for_memory_that_is_being_made(job: JobDir, gate: Gate) -> None:
    slots = alone(job)
    slots.reserve(LARGE)
    assert gate.asked.wait(SECONDS)
    for step in (1, 2, 3):
        assert not_ready(slots, step)
    assert len(files(job)) == 2, "the two that are being made, and none for each try"
    gate.open.set()
    assert slots.wait_made(SECONDS)
    for step in (4, 5, 6):
        commit(slots, step)
    assert steps(job) == [5, 6] and len(files(job)) == 2
    slots.close()


def test_who_waits_makes_what_is_left_itself(job: JobDir, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[str, int]] = []
    waiting, go, make = threading.Event(), threading.Event(), pages._Making._make

    def slow(making: pages._Making, start: int, stop: int) -> int:
        name = threading.current_thread().name
        made.append((name, start))
        if name == "rekindle-memory" and start:
            waiting.set()
            go.wait(0.2)  # as long as a piece takes a thread that hardly gets a core
        return make(making, start, stop)

    monkeypatch.setattr(pages, "_TOGETHER", 4 << 20)
    monkeypatch.setattr(pages._Making, "_make", slow)
    slots = alone(job)
    slots.reserve(3 * LARGE)
    assert waiting.wait(SECONDS)
    commit(slots, 1, 3 * LARGE, wait=True)
    go.set()
    mine = [start for name, start in made if name != "rekindle-memory"]
    assert mine and min(mine) > 0, "what the thread had made is not made again"
    assert slots.wait_made(SECONDS)
    commit(slots, 2, 3 * LARGE)
    slots.close()


def test_small_memory_is_made_at_once(job: JobDir, gate: Gate) -> None:
    slots = alone(job)
    slots.reserve(AT_ONCE)
    for step in (1, 2, 3):
        commit(slots, step, AT_ONCE)
    assert not gate.asked.is_set() and steps(job) == [2, 3]
    slots.close()


def test_a_state_that_grows_keeps_its_newest_snapshot_while_memory_is_made(job: JobDir, gate: Gate) -> None:
    slots = alone(job)
    for step in (1, 2):
        save(slots, step)
    for step in (3, 4, 5):
        assert not_ready(slots, step)
        assert steps(job) == [2]
        assert_sound(job, 2)
    gate.open.set()
    assert slots.wait_made(SECONDS)
    commit(slots, 6)
    assert steps(job) == [2, 6]
    assert not_ready(slots, 7), "the other file is as small as it was"
    assert slots.wait_made(SECONDS)
    commit(slots, 8)
    assert steps(job) == [6, 8] and len(files(job)) == 2
    slots.close()


def test_a_state_that_grows_and_shrinks_a_little_is_given_what_it_lacks_at_once(job: JobDir, gate: Gate) -> None:
    slots = alone(job)
    for step, more in enumerate((0, 0, 1, 2, 9, 3, 1, 200, 4, 5, 6), 1):
        commit(slots, step, LARGE + (more << 12), wait=step < 3)
        with open_step(job, step) as shard:
            assert not verify_shard(shard)
    assert steps(job) == [10, 11] and not gate.asked.is_set()
    slots.close()


def test_a_state_that_outgrows_what_is_made_is_outrun(job: JobDir) -> None:
    """A slot never has more beyond the state than twice its growth since the making before."""
    slots, nbytes, grown = alone(job), LARGE, 0
    for step in range(1, 5):
        if not not_ready(slots, step, nbytes):
            break
        assert slots.wait_made(SECONDS)
        assert job.held_bytes() <= len(slots.slots) * (nbytes + 2 * grown) + (1 << 20)
        grown = nbytes // 4 // 4096 * 4096 + LARGE
        nbytes += grown
    assert step == 3, "the second making is of more than it was asked for"
    assert slots.wait_made(SECONDS)
    commit(slots, step, nbytes)
    assert slots.wait_made(SECONDS) and slots.slots[0].size == nbytes, "the rest is given back"
    slots.close()


def test_no_more_is_made_than_there_is_room_for(job: JobDir, small_tmpfs) -> None:
    small = job_in(small_tmpfs(6 * LARGE))
    for where, limit, size in ((job, None, 7 * LARGE), (job, 5 * LARGE, 3 * LARGE), (small, None, 3 * LARGE)):
        slots = alone(where, limit)
        assert not_ready(slots, 1) and slots.wait_made(SECONDS)
        assert not_ready(slots, 2, 3 * LARGE) and slots.wait_made(SECONDS)
        assert slots.slots[0].size == size
        commit(slots, 3, 3 * LARGE)
        slots.free_all()
        slots.close()
        for path in files(where):
            path.unlink()


def test_room_that_is_taken_meanwhile_costs_no_more_than_what_was_to_be_made_beyond_the_state(
    small_tmpfs, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = job_in(small_tmpfs(6 * LARGE))
    monkeypatch.setattr(JobDir, "free_bytes", lambda _: 1 << 40)
    slots = alone(job)
    assert not_ready(slots, 1) and slots.wait_made(SECONDS)
    assert not_ready(slots, 2, 3 * LARGE) and slots.wait_made(SECONDS)
    assert slots.slots[0].held < 4 * LARGE, "the rest is left to others"
    commit(slots, 3, 3 * LARGE)
    assert steps(job) == [3]
    slots.close()


class Cut:
    """Stands before each cut of a file that the background thread is about to make."""

    def __init__(self) -> None:
        self.open, self.asked = threading.Event(), threading.Event()
        self._truncate = os.ftruncate

    def truncate(self, fd: int, nbytes: int) -> None:
        if threading.current_thread().name == "rekindle-memory" and nbytes < os.fstat(fd).st_size:
            self.asked.set()
            assert self.open.wait(SECONDS)
        self._truncate(fd, nbytes)


@pytest.fixture
def cut(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cut]:
    cut = Cut()
    monkeypatch.setattr("rekindle.memory.slot.os.ftruncate", cut.truncate)
    yield cut
    cut.open.set()


def test_what_a_state_that_shrank_leaves_is_given_back_beside_training(job: JobDir, cut: Cut) -> None:
    slots = alone(job)
    for step in (1, 2):
        commit(slots, step, 4 * LARGE, wait=True)
    commit(slots, 3)
    assert cut.asked.wait(SECONDS)
    with open_step(job, 3) as shard:
        assert os.path.getsize(shard.path) == 4 * LARGE
        assert not verify_shard(shard), "it is read while it is too long"
    cut.open.set()
    assert slots.wait_made(SECONDS)
    commit(slots, 4)
    assert slots.wait_made(SECONDS)
    assert job.held_bytes() < 2 * LARGE + (1 << 20)
    for step in (3, 4):
        with open_step(job, step) as shard:
            assert not verify_shard(shard)
    slots.close()


def test_a_state_that_grows_again_while_its_memory_is_cut_gets_it_back(job: JobDir, cut: Cut) -> None:
    slots = alone(job)
    for step in (1, 2):
        commit(slots, step, 4 * LARGE, wait=True)
    slots.acquire(3, FIRST, LARGE, wait=False).unlock()
    assert cut.asked.wait(SECONDS)
    threading.Timer(0.1, cut.open.set).start()  # it lets go within a piece
    commit(slots, 3, 3 * LARGE, wait=True)
    assert slots.wait_made(SECONDS)
    with open_step(job, 3) as shard:
        assert not verify_shard(shard)
    slots.close()


def test_a_gasp_does_not_wait_for_a_surplus_to_be_given_back(job: JobDir, monkeypatch: pytest.MonkeyPatch) -> None:
    slots = alone(job)
    for step in (1, 2):
        commit(slots, step, 4 * LARGE, wait=True)
    with monkeypatch.context() as patch:
        patch.setattr("rekindle.memory.slot.os.ftruncate", None)
        slot = slots.acquire(3, FIRST, LARGE, gasp=True)
    stamp = ShardId(3, 0, 1, FIRST)
    receipt, data = make_shard(stamp, {"x": bytes(LARGE - 4096)})
    assert slot.map is not None
    slot.map[:LARGE] = data
    slots.commit(slot, stamp, receipt.raw)
    with open_step(job, 3) as shard:
        assert os.path.getsize(shard.path) == 4 * LARGE and not verify_shard(shard)
    commit(slots, 4, wait=True)
    commit(slots, 5, wait=True)
    assert job.held_bytes() < 2 * LARGE + (1 << 20), "the next save gives it back"
    slots.close()


def test_a_third_slot_is_made_and_dropped_beside_training(job: JobDir, gate: Gate, page_locks: type[Lock]) -> None:
    """Step 1 is drained, and 2 is the newest: nothing may take the place of either, until there is a third."""
    slots = Slots(job, 0, 1, [0], None, page_locks)
    for step in (1, 2):
        commit(slots, step, wait=True, persist=step == 1)
    with open_step(job, 1):
        for step in (3, 4):
            assert not_ready(slots, step)
        assert steps(job) == [1, 2] and len(files(job)) == 3
        gate.open.set()
        assert slots.wait_made(SECONDS)
        commit(slots, 5, persist=False)
        assert steps(job) == [1, 2, 5]
    job.notes.write_durable(1)
    for step in range(6, 24):
        commit(slots, step, persist=False)
    assert slots.wait_made(SECONDS) and len(files(job)) == 2
    assert page_locks.dropped_by == ["rekindle-memory"]
    slots.close()


def test_third_slots_that_come_and_go_stay_longer_each_time(job: JobDir) -> None:
    slots, lasted = alone(job), []
    step = 0
    for _ in range(3):
        for _ in range(2):
            step += 1
            save(slots, step)
        with open_step(job, step - 1):
            save(slots, step := step + 1)
            save(slots, step := step + 1)
        assert len(slots.slots) == 3
        since = step
        job.notes.write_durable(step)
        while len(slots.slots) == 3:
            save(slots, step := step + 1, persist=False)
        lasted.append(step - since)
    assert lasted[0] < lasted[1] < lasted[2] < 80


def job_in(path: Path) -> JobDir:
    job = JobDir.of(Path("/some/run"), memory_base(path))
    job.create()
    return job


def test_without_room_for_a_third_the_oldest_is_overwritten_after_one_try(small_tmpfs) -> None:
    job = job_in(small_tmpfs(2 * LARGE + (8 << 20)))
    slots = alone(job)
    for step in (1, 2):
        commit(slots, step, wait=True)
    with open_step(job, 1):
        assert not_ready(slots, 3)
        assert slots.wait_made(SECONDS)
        for step in (4, 5, 6):
            commit(slots, step)
            assert steps(job) == [1, step] and len(files(job)) == 2
    slots.close()


def test_memory_that_is_too_small_is_reported_by_the_save_that_wants_it(small_tmpfs) -> None:
    """And by every later one: none is left out for memory that doesn't come."""
    job = job_in(small_tmpfs(LARGE // 2))
    slots = alone(job)
    slots.reserve(LARGE)
    assert slots.wait_made(SECONDS)
    failed = 0
    for step in range(1, 5):
        try:
            slots.acquire(step, FIRST, LARGE, wait=False)
        except MemoryStoreError as error:
            failed += 1
            assert "no room left for a snapshot of 16,781,312 bytes" in str(error)
        except NotReadyError:
            assert slots.wait_made(SECONDS)
    assert failed >= 2
    assert job.held_bytes() < LARGE // 4, "what could be had of it is given back"
    save(slots, 9)  # what fits still goes
    slots.close()


def test_closing_does_not_wait_for_all_of_it(job: JobDir, gate: Gate) -> None:
    slots = alone(job)
    slots.reserve(LARGE)
    assert gate.asked.wait(SECONDS)
    opened = len(os.listdir("/proc/self/fd"))
    threading.Timer(0.05, gate.open.set).start()
    slots.close()
    assert slots.wait_made(SECONDS)
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) < opened, "files and mappings are let go of"
    again = alone(job)
    again.adopt()
    commit(again, 1, wait=True)
    assert steps(job) == [1] and len(files(job)) == 2
    again.close()


DIE = """
import os, signal, sys, threading
from pathlib import Path
from rekindle.memory import pages
from rekindle.memory.job_dir import JobDir
from rekindle.memory.pages import AT_ONCE
from tests.memory.saved import alone, save
make = pages._Making._make

def die(making, start, stop):
    if start >= 2 * AT_ONCE:
        os.kill(os.getpid(), signal.SIGKILL)
    return make(making, start, stop)

slots = alone(JobDir(Path(sys.argv[1])))
save(slots, 1)
pages._TOGETHER, pages._Making._make = AT_ONCE, die
slots.reserve(4 * AT_ONCE)
slots.wait_made(60)
"""


def test_a_process_killed_while_memory_is_made_leaves_its_snapshot_and_no_holes(job: JobDir) -> None:
    run_until_killed(DIE, job)
    assert steps(job) == [1]
    assert_sound(job, 1)
    successor = successor_of(job)
    broken = [slot for slot in successor.slots if slot.stamp is None]
    assert broken and broken[0].held < broken[0].size, "it is in the middle"
    commit(successor, 2, 4 * AT_ONCE, wait=True)
    assert_sound(job, 1)
    assert steps(job) == [1, 2]
    successor.close()


def test_pages_are_a_mapping(tmp_path: Path) -> None:
    fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    os.ftruncate(fd, mmap.PAGESIZE)
    mapping = Pages(fd, mmap.PAGESIZE)
    mapping.make(fd, mmap.PAGESIZE, None, lambda: True)
    mapping[:5] = b"bytes"
    assert os.pread(fd, 5, 0) == b"bytes" and mapping.made == mmap.PAGESIZE
    os.close(fd)


def page_faults() -> int:
    """Page faults of this thread that needed nothing from a disk."""
    return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Linux maps pages ahead of their first use")
def test_pages_are_mapped_many_at_a_time_and_a_save_takes_no_page_fault(
    job: JobDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that had no zeros yet would be zeroed and mapped one by one, while every ``mmap`` of training waits."""
    populate, faults = pages.populate, list[int]()

    def count(address: int, nbytes: int) -> None:
        before = page_faults()
        populate(address, nbytes)
        faults.append(page_faults() - before)

    monkeypatch.setattr(pages, "populate", count)
    slots = alone(job)
    slots.reserve(LARGE, count=1)
    assert slots.wait_made(SECONDS)
    slot = slots.acquire(1, FIRST, LARGE, wait=False)
    anchor = ctypes.c_char.from_buffer(slot.map)
    before = page_faults()
    ctypes.memset(ctypes.addressof(anchor), 1, LARGE)
    written, there = page_faults() - before, LARGE // mmap.PAGESIZE
    assert written < there // 16 and 0 < sum(faults) < there // 4
    del anchor
    slot.unlock()
    slots.close()


def test_any_error_of_the_thread_is_reported_by_one_save_and_ends_no_later_one(job: JobDir) -> None:
    failing = [RuntimeError("can't start new thread")]

    def page_lock(*_: object) -> None:
        if failing:
            raise failing.pop()

    slots = Slots(job, 0, 1, [0], None, page_lock)
    slots.reserve(LARGE, count=1)
    assert slots.wait_made(SECONDS)
    with pytest.raises(MemoryStoreError, match="making memory failed: RuntimeError: can't start new thread"):
        slots.acquire(1, FIRST, LARGE, wait=False)
    commit(slots, 2, wait=True)
    assert not_ready(slots, 3) and slots.wait_made(SECONDS)
    commit(slots, 4)
    assert steps(job) == [2, 4]
    slots.close()


def test_a_thread_that_can_not_be_started_is_reported_by_the_save_that_wants_memory(
    job: JobDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, refused = threading.Thread.start, ["rekindle-memory"] * 2

    def refuse(thread: threading.Thread) -> None:
        if thread.name in refused:
            refused.remove(thread.name)
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    slots = alone(job)
    slots.reserve(LARGE)
    assert slots.wait_made(SECONDS) and not refused
    with pytest.raises(MemoryStoreError, match="memory for snapshots is not made: can't start new thread"):
        slots.acquire(1, FIRST, LARGE, wait=False)
    commit(slots, 2, wait=True)
    assert steps(job) == [2]
    slots.close()


def test_the_thread_ends_when_there_is_nothing_to_do(job: JobDir) -> None:
    slots = alone(job)
    slots.reserve(LARGE)
    assert slots.wait_made(SECONDS)
    for thread in threading.enumerate():
        if thread.name == "rekindle-memory":
            thread.join(SECONDS)
    assert "rekindle-memory" not in {thread.name for thread in threading.enumerate()}
    assert SlotMaker(None).wait(0), "it has none to begin with"
    slots.close()
