"""Page locks of slots: made beside training, kept while somebody writes, left alone in a gasp."""

from __future__ import annotations

import threading
import weakref

import pytest

from rekindle.format.lineage import ShardId
from rekindle.memory import pages
from rekindle.memory.job_dir import JobDir
from rekindle.memory.pages import AT_ONCE, LOCKED
from rekindle.memory.slots import Slots
from tests.conftest import make_shard
from tests.memory.page_locks import Lock
from tests.memory.saved import FIRST, save, steps

LARGE = AT_ONCE + 4096
"""Bytes of a snapshot whose memory is not made inside of ``step()``."""
SECONDS = 60.0


def test_page_locks_are_made_in_parts_by_the_thread_that_makes_memory(
    job: JobDir, monkeypatch: pytest.MonkeyPatch, page_locks: type[Lock]
) -> None:
    monkeypatch.setattr(pages, "LOCKED", 8 << 20)
    slots = Slots(job, 0, 1, [0], None, page_locks)
    slots.reserve(LARGE, count=1)
    assert slots.wait_made(SECONDS)
    assert sorted(one.range for one in page_locks.alive) == [(0, 8 << 20), (8 << 20, 16 << 20), (16 << 20, LARGE)]
    assert {one.thread for one in page_locks.alive} == {"rekindle-memory"}
    slots.close()
    assert LOCKED == 1 << 30


def test_a_page_lock_that_failed_is_not_tried_at_every_save(job: JobDir) -> None:
    tries: list[tuple[int, int]] = []

    def fail(view: object, start: int, stop: int) -> None:
        tries.append((start, stop))

    slots = Slots(job, 0, 1, [0], None, fail)
    for step in range(1, 8):
        save(slots, step)
    assert len(tries) == 2, "one for each slot"
    slots.close()


def test_whoever_writes_keeps_the_mapping_and_its_page_locks(job: JobDir, page_locks: type[Lock]) -> None:
    slots = Slots(job, 0, 1, [0], None, page_locks)
    save(slots, 1)
    slot = slots.acquire(2, FIRST, 1 << 20)
    writer = memoryview(slot.map)[4096:]
    mapping = weakref.ref(slot.map)
    del slot
    slots.recover()  # a save was interrupted at an unknown point: this thread is still writing
    assert mapping() is not None and len(page_locks.alive) == 1
    writer[:5] = b"still"
    del writer
    assert mapping() is None and not page_locks.alive, "at once, without a collection"
    slots.close()


def test_a_gasp_page_locks_nothing_and_lets_go_of_no_lock(job: JobDir, page_locks: type[Lock]) -> None:
    """Either may wait for a device that hangs."""
    slots = Slots(job, 0, 1, [0], None, page_locks)
    for step in (1, 2):
        save(slots, step)
    slot = slots.acquire(3, FIRST, LARGE, gasp=True)
    assert slot.map is not None and not slot.map.page_locked
    assert len(page_locks.alive) == 2 and not page_locks.dropped_by
    slot.unlock()
    slots.close()


def test_a_gasp_goes_on_without_the_slot_that_a_page_lock_hangs_in(
    job: JobDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rekindle.memory.slots._LET_GO_IN_A_GASP", 0.1)
    monkeypatch.setattr("rekindle.memory.slots._LET_GO", 0.1)
    hangs, end = threading.Event(), threading.Event()

    def hang(view: object, start: int, stop: int) -> None:
        hangs.set()
        assert end.wait(SECONDS)

    slots = Slots(job, 0, 1, [0], None, hang)
    slots.reserve(LARGE)
    assert hangs.wait(SECONDS)
    slot = slots.acquire(1, FIRST, LARGE, gasp=True)
    stamp = ShardId(1, 0, 1, FIRST)
    slots.commit(slot, stamp, make_shard(stamp, {})[0].raw)
    assert steps(job) == [1]
    slots.close()
    end.set()
    assert slots.wait_made(SECONDS)


def test_a_file_that_was_cut_gets_a_new_mapping_and_new_locks_when_it_grows_again(
    job: JobDir, page_locks: type[Lock]
) -> None:
    """The old locks hold pages that are no longer the file's: a device would copy into those."""
    slots = Slots(job, 0, 1, [0], None, page_locks)
    slot = slots.acquire(1, FIRST, 3 << 20)
    first = weakref.ref(slot.map)
    slot.unlock()
    slot = slots.acquire(1, FIRST, 1 << 20)
    assert slot.map is first(), "to map it anew would cost its page faults again"
    slot.unlock()
    slot = slots.acquire(1, FIRST, 2 << 20)
    assert first() is None and {lock.range for lock in page_locks.alive} == {(0, 2 << 20)}
    slot.map[slot.size - 1 : slot.size] = b"x"
    slots.close()
