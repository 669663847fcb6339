"""Copies of another node's snapshots: committed as snapshots are, and whatever interrupts one, an older one stays."""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
from pathlib import Path

import pytest

from rekindle.common.failpoints import POINTS, arm, reach
from rekindle.errors import MemoryStoreError
from rekindle.format.lineage import CheckpointKey, Incarnation, ShardId
from rekindle.format.names import shard_name, step_dir
from rekindle.memory.copies import CopySlots
from rekindle.memory.job_dir import JobDir, memory_base
from rekindle.memory.notes import Common
from rekindle.memory.slots import Slots
from tests.conftest import make_shard
from tests.memory.saved import FIRST, SIZE, assert_sound, content, files, save, steps

SECOND = Incarnation(2, "b" * 16, FIRST.id, 9)
WORLD = 4


def slots_for(job: JobDir, *ranks: int) -> CopySlots:
    slots = CopySlots(job, ranks, WORLD, 0)
    slots.adopt()
    return slots


def write(slots: CopySlots, step: int, rank: int, start: Incarnation = FIRST, size: int = SIZE) -> None:
    """Copies as if from another node, in two halves."""
    stamp = ShardId(step, rank, WORLD, start, True)
    receipt, raw = make_shard(stamp, {"x": content(step, rank, size)})
    data = raw[receipt.header_bytes :]

    def fill(place: memoryview) -> list[str]:
        assert len(place) == len(data)
        place[: size // 2] = data[: size // 2]
        reach("save.copying", step)
        place[size // 2 :] = data[size // 2 :]
        return receipt.checksums

    slots.write(stamp, receipt.layout, fill, lambda sums: receipt.raw if sums == receipt.checksums else b"")


def key(step: int, start: Incarnation = FIRST) -> CheckpointKey:
    return CheckpointKey(step, start)


def note_safe(job: JobDir, step: int, start: Incarnation = FIRST) -> None:
    job.notes.write_common(Common(start.id, step, step, -1))


def test_copies_are_found_sound_and_apart_from_snapshots(job: JobDir) -> None:
    slots = slots_for(job, 2, 3)
    assert not slots.has(key(1), [2])
    write(slots, 1, 2)
    assert slots.has(key(1), [2]) and not slots.has(key(1), [2, 3]) and not slots.has(key(1, SECOND), [2])
    write(slots, 1, 3)
    assert slots.has(key(1), [2, 3])
    for rank in (2, 3):
        assert_sound(job.copies, 1, rank, WORLD)
        assert steps(job, rank) == []
    own = Slots(job, 2, WORLD, [2])
    own.adopt()
    assert own.slots == [], "a rank that begins here leaves its copy alone"
    save(own, 1)
    slots.close()
    assert_sound(job.copies, 1, 2, WORLD)
    assert job.path.stat().st_mode & 0o77 == job.copies.path.stat().st_mode & 0o77 == 0


def test_two_files_of_each_rank_are_enough(job: JobDir) -> None:
    slots = slots_for(job, 2, 3)
    for step in range(1, 8):
        for rank in (2, 3):
            write(slots, step, rank)
        note_safe(job, step)
    for rank in (2, 3):
        assert steps(job.copies, rank) == [6, 7] and len(files(job.copies, rank)) == 2


def test_a_state_that_grows_and_shrinks(job: JobDir) -> None:
    slots = slots_for(job, 2)
    for step, size in enumerate([SIZE, 3 * SIZE, 10, 2 * SIZE], start=1):
        write(slots, step, 2, size=size)
        assert_sound(job.copies, step, 2, WORLD, size=size)


def test_a_source_that_fails_leaves_the_copies_before_and_a_slot_to_use(job: JobDir) -> None:
    slots = slots_for(job, 2)
    for step in (1, 2):
        write(slots, step, 2)
    note_safe(job, 1)
    receipt, _ = make_shard(ShardId(3, 2, WORLD, FIRST), {"x": content(3)})

    def fail(place: memoryview) -> list[str]:
        place[:100] = bytes(100)
        raise ConnectionResetError("gone")

    for _ in range(3):
        with pytest.raises(ConnectionResetError):
            slots.write(receipt.stamp, receipt.layout, fail, lambda sums: receipt.raw)
        assert steps(job.copies, 2) == [1]
    assert_sound(job.copies, 1, 2, WORLD)
    for path in files(job.copies, 2):
        with open(path) as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    write(slots, 4, 2)
    assert steps(job.copies, 2) == [1, 4] and len(files(job.copies, 2)) == 2


def test_without_room_it_is_an_error_and_the_safe_copy_stays(small_tmpfs) -> None:
    job = JobDir.of(Path("/some/run"), memory_base(small_tmpfs(1 << 20)))
    job.create()
    slots = slots_for(job, 2)
    write(slots, 1, 2, size=300_000)
    note_safe(job, 1)
    for step in (2, 3):
        with pytest.raises(MemoryStoreError, match="no room"):
            write(slots, step, 2, size=900_000)
        assert steps(job.copies, 2) == [1]
    assert_sound(job.copies, 1, 2, WORLD, size=300_000)
    write(slots, 4, 2, size=300_000)
    assert steps(job.copies, 2) == [1, 4]


@pytest.mark.parametrize("all_of_it", [False, True])
def test_after_somebody_has_removed_the_files_copies_are_made_again(job: JobDir, all_of_it: bool) -> None:
    slots = slots_for(job, 2)
    for step in (1, 2):
        write(slots, step, 2)
    shutil.rmtree(job.path if all_of_it else job.copies.path)
    with pytest.raises(MemoryStoreError):
        write(slots, 3, 2)
    assert job.path.exists() is not all_of_it, "whoever copies makes no job"
    job.create()
    write(slots, 4, 2)
    write(slots, 5, 2)
    assert steps(job.copies, 2) == [4, 5] and len(files(job.copies, 2)) == 2
    assert_sound(job.copies, 5, 2, WORLD)


def test_copies_of_ranks_that_another_node_keeps_now_go_once_there_are_newer_ones(job: JobDir) -> None:
    before = slots_for(job, 0, 1)
    for step in (8, 9):
        for rank in (0, 1):
            write(before, step, rank)
    note_safe(job, 9)
    before.close()
    local_state = job.copies.paths.local_state_plan(0)
    local_state.write_bytes(b"of others to remove")
    stray = job.copies.path / step_dir(8) / shard_name(0, 7)
    stray.write_bytes(b"")

    slots = slots_for(job, 1, 2)
    slots.tidy([1, 2])
    assert steps(job.copies, 0) == [8, 9], "nothing is newer yet"
    for rank in (1, 2):
        write(slots, 12, rank, SECOND)
    slots.tidy([1, 2])
    assert steps(job.copies, 0) == [9] and 9 in steps(job.copies, 1), "the only safe step"
    note_safe(job, 12, SECOND)
    slots.tidy([1, 2])
    assert steps(job.copies, 0) == [] and files(job.copies, 0) == [] and local_state.exists() and not stray.exists()
    assert steps(job.copies, 2) == [12]


def test_copies_that_storage_makes_superfluous_make_room_for_those_of_other_ranks(job: JobDir) -> None:
    before = slots_for(job, 0)
    for step in (8, 9):
        write(before, step, 0)
    note_safe(job, 9)
    before.close()
    slots = slots_for(job, 1)
    job.notes.write_durable(8)
    slots.tidy([1])
    assert steps(job.copies, 0) == [9]
    job.notes.write_durable(9)
    slots.tidy([1])
    assert steps(job.copies, 0) == [] and files(job.copies, 0) == []


def test_the_end_of_the_job_removes_them(job: JobDir) -> None:
    write(slots_for(job, 2), 1, 2)
    assert job.held_bytes() > SIZE and job.remove() and not job.path.exists()


# -- killed at any moment ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("point", POINTS["save"])
def test_an_agent_killed_in_a_copy_leaves_an_older_copy_or_the_new_one(job: JobDir, point: str) -> None:
    """Two ranks are copied, and it dies at step 3 of the first: the safe step 1 has to be whole for both."""
    slots = slots_for(job, 2, 3)
    for step in (1, 2):
        for rank in (2, 3):
            write(slots, step, rank)
    note_safe(job, 1)
    slots.close()
    if (child := os.fork()) == 0:
        try:
            arm(f"{point}@3")
            write(slots_for(job, 2, 3), 3, 2)
        finally:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
    assert steps(job.copies, 2) == ([1, 3] if point == "save.committed" else [1]) and steps(job.copies, 3) == [1, 2]
    for rank in (2, 3):
        for step in steps(job.copies, rank):
            assert_sound(job.copies, step, rank, WORLD)

    again = slots_for(job, 2, 3)
    for rank in (2, 3):
        write(again, 4, rank, Incarnation(2, "b" * 16, FIRST.id, 2))
        assert_sound(job.copies, 4, rank, WORLD)
        assert steps(job.copies, rank) == [1, 4] and len(files(job.copies, rank)) == 2
    assert not list(job.path.rglob("*.tmp")) and len(list(job.copies.path.glob("step-*"))) == 2
