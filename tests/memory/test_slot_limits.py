"""Limits and a full memory cost a save at most: the newest complete snapshot stays."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest

from rekindle.errors import MemoryStoreError
from rekindle.format.lineage import Incarnation, ShardId
from rekindle.format.names import step_dir
from rekindle.memory.job_dir import JobDir, memory_base
from rekindle.memory.slots import Slots
from rekindle.storage.verify import verify_shard
from tests.conftest import make_shard
from tests.memory.saved import (
    FILE,
    FIRST,
    alone,
    assert_sound,
    begin,
    content,
    end,
    files,
    open_step,
    run_until_killed,
    save,
    steps,
    successor_of,
)


def test_with_room_for_two_and_one_being_read_saving_goes_on_and_the_newest_wins(job):
    """A save while the previous drain is still running, and memory for no third snapshot."""
    slots = alone(job, 2 * FILE + 100)
    slots.reserve(FILE)
    save(slots, 1)
    with open_step(job, 1) as drain:
        for step in range(2, 10):
            slot = begin(slots, step)
            assert steps(job), "at least one complete snapshot stays while the next is written"
            end(slots, slot, step)
            assert steps(job) == [1, step]
            assert_sound(job, step)
            assert len(files(job)) == 2 and job.held_bytes() <= 2 * (FILE + 3 * 4096)
        assert not verify_shard(drain)


def test_with_room_for_two_and_both_being_read_it_is_an_error_and_nothing_is_lost(job):
    slots = alone(job, 2 * FILE + 100)
    save(slots, 1)
    save(slots, 2)
    with open_step(job, 1), open_step(job, 2):
        with pytest.raises(MemoryStoreError, match="being read"):
            slots.acquire(3, FIRST, FILE)
        assert steps(job) == [1, 2]
    save(slots, 3)
    assert steps(job) == [2, 3]


def test_three_files_are_the_most_there_are(job):
    slots = alone(job)
    with ExitStack() as pins:
        for step in (1, 2, 3):
            save(slots, step)
            pins.enter_context(open_step(job, step))
        assert len(files(job)) == 3
        with pytest.raises(MemoryStoreError):
            slots.acquire(4, FIRST, FILE)
        assert len(files(job)) == 3 and steps(job) == [1, 2, 3]
    save(slots, 4)
    assert_sound(job, 4)


def test_a_snapshot_on_its_way_to_storage_is_not_the_first_to_go(job):
    """Step 2 was asked to be durable and isn't yet; steps 1 and 3 were not."""
    slots = alone(job)
    for step in (1, 2, 3, 4, 5):
        save(slots, step, persist=step == 2)
    assert 2 in steps(job) and 5 in steps(job)
    job.notes.write_durable(2)
    save(slots, 6)
    save(slots, 7)
    assert 2 not in steps(job)


def test_the_oldest_snapshot_that_is_to_be_pinned_stays_until_storage_has_it(job):
    slots, newest = alone(job), ShardId(9, 0, 1, FIRST)

    def pin(step: int) -> None:
        stamp = ShardId(step, 0, 1, FIRST, True, pinned=True)
        slots.commit(begin(slots, step), stamp, make_shard(stamp, {"x": content(step)})[0].raw)

    for step in (1, 2):
        pin(step)
    assert [stamp.step for stamp in slots.pins_due(newest)] == [1, 2]
    for step in (3, 4, 5, 6):
        save(slots, step)
    assert steps(job)[0] == 1 and 2 not in steps(job) and len(files(job)) <= 4
    assert slots.pins_due(ShardId(1, 0, 1, FIRST)) == [], "older ones only"
    assert slots.pins_due(ShardId(9, 0, 1, Incarnation(2, "b" * 16, parent="a" * 16, parent_step=0))) == [], "abandoned"
    job.notes.write_durable(1)
    assert slots.pins_due(newest) == []
    pin(7)
    for step in (8, 9, 10):
        save(slots, step)
    assert 1 not in steps(job) and 7 in steps(job)


def job_in(path: Path) -> JobDir:
    job = JobDir.of(Path("/some/run"), memory_base(path))
    job.create()
    return job


def test_a_snapshot_larger_than_the_memory_is_an_error_and_no_bus_error(small_tmpfs):
    job = job_in(small_tmpfs(1 << 20))
    slots = alone(job)
    slots.reserve(4 << 20)
    with pytest.raises(MemoryStoreError, match=r"no room left.*4,194,304 bytes"):
        slots.acquire(1, FIRST, 4 << 20)
    save(slots, 1)  # what fits still goes
    assert_sound(job, 1)
    assert len(files(job)) <= 3


def test_a_state_that_outgrows_the_memory_leaves_the_newest_snapshot(small_tmpfs):
    job = job_in(small_tmpfs(1 << 20))
    slots = alone(job)
    save(slots, 1)
    save(slots, 2)
    with pytest.raises(MemoryStoreError, match="no room left"):
        slots.acquire(3, FIRST, 2 << 20)
    assert_sound(job, 2)
    save(slots, 4)
    assert_sound(job, 4)


def test_no_room_for_a_third_snapshot_beside_a_reader_takes_the_second(small_tmpfs):
    size = 400_000
    job = job_in(small_tmpfs(1 << 20))
    slots = alone(job)
    save(slots, 1, size=size)
    with open_step(job, 1) as drain:
        for step in (2, 3, 4):
            save(slots, step, size=size)
            assert steps(job) == [1, step]
            assert len(files(job)) == 2
        assert not verify_shard(drain)


def test_memory_that_somebody_else_fills_is_an_error_and_the_next_save_leaves_no_litter(small_tmpfs):
    base = small_tmpfs(1 << 20)
    job = job_in(base)
    slots = alone(job)
    save(slots, 1)
    slot = begin(slots, 2)
    fill(base / "filler")
    stamp = ShardId(2, 0, 1, FIRST)
    receipt, _ = make_shard(stamp, {"x": content(2)})
    with pytest.raises(MemoryStoreError):
        slots.commit(slot, stamp, receipt.raw)
    assert steps(job) == [1]
    assert_sound(job, 1)
    (base / "filler").unlink()
    save(slots, 3)
    assert steps(job) == [1, 3]
    assert not list(job.path.rglob("*.tmp"))
    assert sorted(path.name for path in job.path.glob("step-*")) == [step_dir(1), step_dir(3)]


def marked(job: JobDir) -> list[tuple[int, bool]]:
    return sorted((stamp.step, stamp.persist) for stamp, _ in job.snapshots.shard_ids())


MARK = """
import sys
from pathlib import Path
from rekindle.common.failpoints import arm
from rekindle.memory.job_dir import JobDir
from tests.memory.saved import save, alone
from tests.memory.test_slot_limits import mark, fill

job = JobDir(Path(sys.argv[1]))
slots = alone(job)
save(slots, 1, persist=False)
save(slots, 2, persist=False)
fill(job.path.parent / "filler")
arm("save.receipt@2")
mark(slots, 2)
"""


def mark(slots: Slots, step: int) -> None:
    """Marks a committed snapshot for storage."""
    stamp = ShardId(step, 0, 1, FIRST)
    slots.write_receipt(stamp, make_shard(stamp, {"x": content(step)})[0].raw)


def test_a_snapshot_in_full_memory_is_marked_for_storage_and_so_is_the_next_one(small_tmpfs):
    base = small_tmpfs(1 << 20)
    job = job_in(base)
    slots = alone(job)
    save(slots, 1, persist=False)
    save(slots, 2, persist=False)
    fill(base / "filler")
    for step in (2, 1, 2):
        mark(slots, step)
    assert marked(job) == [(1, True), (2, True)]
    for step in (3, 4):
        save(slots, step, persist=False)
        mark(slots, step)
        assert marked(job) == [(step - 1, True), (step, True)]
        assert_sound(job, step)
    assert not list(job.path.rglob("*.tmp"))
    job.snapshots.remove(0)
    assert not list(job.path.rglob("rank-*"))


def test_a_death_while_it_is_marked_in_full_memory_loses_nothing(small_tmpfs):
    job = job_in(small_tmpfs(1 << 20))
    run_until_killed(MARK, job)
    assert marked(job) == [(1, False), (2, False)] and list(job.path.rglob("*.tmp"))
    slots = successor_of(job)
    assert marked(job) == [(1, False), (2, False)] and not list(job.path.rglob("*.tmp"))
    mark(slots, 2)
    assert_sound(job, 2)


def fill(path: Path) -> None:
    with open(path, "wb", buffering=0) as file:
        for piece in (65536, 4096, 512):
            try:
                while file.write(b"x" * piece) == piece:
                    pass
            except OSError:
                continue


def test_a_directory_that_went_away_is_an_error_that_names_it(job):
    slots = alone(job)
    job.paths.slots.rmdir()
    with pytest.raises(MemoryStoreError, match=str(job.path)):
        slots.acquire(1, FIRST, FILE)
