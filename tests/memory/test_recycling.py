"""Steps that the nodes keep together stay in memory while saves go on; without room for them the newest goes first."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest

from rekindle.errors import MemoryStoreError
from rekindle.format.lineage import Incarnation, ShardId
from rekindle.memory.job_dir import JobDir, memory_base
from rekindle.memory.notes import Common, SafeStep
from rekindle.memory.recycling import keep_copies
from rekindle.memory.room import Room
from rekindle.memory.slots import NotReadyError, Slots
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
    save,
    steps,
    successor_of,
)

SECOND = Incarnation(2, "b" * 16, FIRST.id, 6)


def note(job: JobDir, step: int, safe: int, start: Incarnation = FIRST, kept: int = -1) -> None:
    job.notes.write_common(Common(start.id, step, safe, -1, kept))


def save_all(slots: Slots, first: int, last: int, start: Incarnation = FIRST) -> None:
    for step in range(first, last + 1):
        save(slots, step, start)


# -- the note ----------------------------------------------------------------------------------------------------------


def test_the_note_says_what_was_written_and_keeps_its_length(job: JobDir) -> None:
    assert job.notes.common() is None and job.notes.marks() is None
    sizes = set()
    for common in (Common("a" * 16, -1, -1, -1), Common("a" * 16, 12, 7, 3, 12), Common("a" * 16, 10**12, 10**12, 0)):
        job.notes.write_common(common)
        assert job.notes.common() == common
        sizes.add((job.path / "common").stat().st_size)
    assert len(sizes) == 1


@pytest.mark.parametrize("text", [b"", b"x", b"\xff" * 40, b"a 1 2 3 b 4", b"a" * 16 + b" 1 2"])
def test_a_damaged_note_counts_as_none(job: JobDir, text: bytes) -> None:
    (job.path / "common").write_bytes(text)
    assert job.notes.common() is None
    note(job, 5, -1)
    assert job.notes.common() == Common(FIRST.id, 5, -1, -1)


def test_the_safe_step_of_a_former_start_is_known_until_there_is_another(job: JobDir) -> None:
    note(job, 5, 3)
    note(job, 9, -1, SECOND)
    note(job, 12, -1, SECOND)
    marks = job.notes.marks()
    assert marks is not None and marks == (Common(SECOND.id, 12, -1, -1), SafeStep(FIRST.id, 3))
    note(job, 15, 12, SECOND)
    marks = job.notes.marks()
    assert marks is not None and marks.safe == SafeStep(SECOND.id, 12)


def test_a_wanted_step_is_noted(job: JobDir) -> None:
    assert job.notes.wanted() is None
    job.notes.write_wanted(17)
    assert job.notes.wanted() == 17


# -- snapshots of a rank -----------------------------------------------------------------------------------------------


def test_the_safe_step_and_the_one_that_is_copied_outlast_any_number_of_saves(job: JobDir) -> None:
    slots = alone(job)
    note(job, 7, 3)  # step 7 is named before it is there
    save_all(slots, 1, 6)
    assert 3 in steps(job)
    for step in range(7, 60):
        slot = begin(slots, step)
        assert {3, min(7, step - 1), step - 1} <= set(steps(job)), "the newest one stays while the next is written"
        end(slots, slot, step)
        assert len(files(job)) <= 4
    assert steps(job) == [3, 7, 58, 59]
    note(job, 62, 7)
    save_all(slots, 60, 70)
    assert set(steps(job)) >= {7, 62, 70} and 3 not in steps(job) and len(files(job)) == 4


def test_slots_that_the_next_common_step_will_need_are_not_dropped_meanwhile(job: JobDir) -> None:
    """Storage has the safe step too, but memory is nearer."""
    slots = alone(job)
    note(job, 7, 3)
    save_all(slots, 1, 10)
    note(job, 7, 7)
    job.notes.write_durable(9)
    save_all(slots, 11, 60)
    assert 7 in steps(job) and len(files(job)) == 4


def test_the_first_step_from_the_named_one_on_is_copied_where_that_one_was_left_out(job: JobDir) -> None:
    slots = alone(job)
    note(job, 4, -1)
    for step in (1, 2, 3, 5, 6, 7, 8):
        save(slots, step)
    assert steps(job)[0] == 5


@pytest.mark.parametrize("unsafe", [{"start": SECOND}, {"step": -1, "safe": -1}])
def test_a_note_that_says_nothing_of_this_start_costs_no_slot(job: JobDir, unsafe: dict) -> None:
    slots = alone(job)
    note(job, **({"step": 3, "safe": 2} | unsafe))
    save_all(slots, 1, 20)
    assert steps(job) == [19, 20] and len(files(job)) == 2


def test_with_room_for_three_the_newest_is_written_over(job: JobDir) -> None:
    slots = alone(job, 3 * FILE + 100)
    note(job, 5, 3)
    for step in range(1, 20):
        slot = begin(slots, step)
        if step > 5:
            assert steps(job) == [3, 5], "both are complete"
        end(slots, slot, step)
    assert steps(job) == [3, 5, 19]


def test_with_room_for_two_saves_go_on_and_the_safe_step_goes_last(job: JobDir, monkeypatch) -> None:
    slots = alone(job, 2 * FILE + 100)
    note(job, 5, 3)
    save_all(slots, 1, 8)
    assert steps(job) == [3, 8]
    note(job, 8, 3)
    with open_step(job, 8):  # it is being drained
        for _ in range(2):
            assert not save_or_leave_out(slots, 9) and steps(job) == [3, 8]
        monkeypatch.setattr("rekindle.memory.slots._STARVES", 0.0)
        assert save_or_leave_out(slots, 10) and steps(job) == [8, 10]


def save_or_leave_out(slots: Slots, step: int) -> bool:
    """Saves as step() does, which waits for no room."""
    try:
        slot = slots.acquire(step, FIRST, FILE, wait=False)
    except NotReadyError:
        return False
    end(slots, slot, step)
    return True


def test_a_step_that_others_count_on_stays_though_saves_are_left_out_meanwhile(job: JobDir) -> None:
    slots = alone(job, 2 * FILE + 100)
    note(job, 5, 3, kept=5)
    save_all(slots, 1, 5)
    assert not save_or_leave_out(slots, 6) and steps(job) == [3, 5]
    with pytest.raises(MemoryStoreError):
        save(slots, 6)  # one that waits goes to storage
    assert job.notes.is_cramped(FIRST.id) and not job.notes.is_cramped(SECOND.id)
    note(job, 5, 3)
    assert save_or_leave_out(slots, 6) and steps(job) == [3, 6]
    note(job, 5, 3, kept=5)  # step 5 is gone
    assert save_or_leave_out(slots, 7) and steps(job) == [3, 7]


def test_with_room_for_two_the_safe_step_goes_once_storage_has_a_newer_one(job: JobDir) -> None:
    slots = alone(job, 2 * FILE + 100)
    note(job, 5, 3, kept=5)
    save_all(slots, 1, 5)
    note(job, 9, 3)
    save_all(slots, 6, 7)
    assert steps(job) == [3, 7]
    job.notes.write_durable(4)
    save_all(slots, 8, 8)
    assert steps(job) == [7, 8]


def test_with_room_for_three_a_reader_of_the_newest_costs_neither_of_those_that_others_count_on(job: JobDir) -> None:
    slots = alone(job, 3 * FILE + 100)
    note(job, 5, 3, kept=5)
    save_all(slots, 1, 6)
    with open_step(job, 6):
        assert not save_or_leave_out(slots, 7) and steps(job) == [3, 5, 6]
    assert save_or_leave_out(slots, 7) and steps(job) == [3, 5, 7]
    assert not job.notes.is_cramped(FIRST.id)


def reserve(slots: Slots, size: int) -> None:
    slots.reserve(size, 4)
    slots.close()


def test_memory_for_what_nodes_keep_together_is_made_ahead_where_there_is_room(job: JobDir, small_tmpfs) -> None:
    reserve(alone(job), FILE)
    assert len(files(job)) == 4
    tight = JobDir.of(Path("/some/run"), memory_base(small_tmpfs(1 << 20)))
    tight.create()
    for size, count in ((450_000, 2), (190_000, 3), (150_000, 4)):
        reserve(alone(tight), size)
        assert len(files(tight)) == count, "two for copies must fit in, too"
        tight.snapshots.remove_shards()
    reserve(alone(tight, 3 * 150_000), 150_000)
    assert len(files(tight)) == 3


def test_a_gasp_takes_what_it_must(job: JobDir) -> None:
    slots = alone(job, 3 * FILE + 100)
    note(job, 5, 3)
    save_all(slots, 1, 6)

    def gasp(step: int) -> None:
        end(slots, slots.acquire(step, FIRST, FILE, gasp=True), step)

    with ExitStack() as pins:
        for step, left in ((7, [3, 5]), (8, [3, 7]), (9, [7, 8])):
            gasp(step)
            assert steps(job) == [*left, step]
            pins.enter_context(open_step(job, step))


def test_a_mate_that_hangs_costs_neither_of_them(job: JobDir) -> None:
    fast, slow = (Slots(job, rank, 2, [0, 1], 3 * FILE + 100) for rank in (0, 1))
    note(job, 5, 3)
    for step in range(1, 6):
        save(fast, step)
        save(slow, step)
    save_all(fast, 6, 12)
    for step in (3, 5):
        assert_sound(job, step, 0, 2)
        assert_sound(job, step, 1, 2)


def test_without_room_the_newest_goes_before_the_one_that_a_mate_has_too(job: JobDir) -> None:
    fast, slow = (Slots(job, rank, 2, [0, 1], 3 * FILE + 100) for rank in (0, 1))
    note(job, 1, 1)
    for slots in (fast, slow):
        for step in (1, 2):
            save(slots, step, persist=False)
    for step in (3, 4, 5):
        save(fast, step, persist=False)
        assert steps(job) == [1, 2, step]


def test_the_safe_step_of_a_former_start_stays_until_the_present_one_has_its_own(job: JobDir) -> None:
    slots = alone(job)
    note(job, 5, 3)
    save_all(slots, 1, 6)
    slots.close()
    again = successor_of(job)
    save_all(again, 7, 12, SECOND)
    assert 3 in steps(job) and 5 not in steps(job), "nobody copies what the former start named"
    note(job, 14, -1, SECOND)
    save_all(again, 13, 20, SECOND)
    assert {3, 14} <= set(steps(job))
    note(job, 22, 14, SECOND)
    save_all(again, 21, 30, SECOND)
    assert {14, 22} <= set(steps(job)) and 3 not in steps(job)


def test_the_safe_step_of_a_former_start_goes_once_storage_has_one_as_new(job: JobDir) -> None:
    slots = alone(job)
    note(job, 5, 3)
    save_all(slots, 1, 6)
    slots.close()
    again = successor_of(job)
    job.notes.write_durable(2)
    save_all(again, 7, 12, SECOND)
    assert 3 in steps(job)
    job.notes.write_durable(3)
    save_all(again, 13, 50, SECOND)
    assert steps(job) == [49, 50] and len(files(job)) == 2


def test_the_fourth_snapshot_leaves_room_for_copies_of_another_node(small_tmpfs) -> None:
    job = JobDir.of(Path("/some/run"), memory_base(small_tmpfs(1 << 20)))
    job.create()
    slots, size = alone(job), 150_000
    note(job, 5, 3)
    job.copies.path.mkdir()
    (job.copies.path / "one").write_bytes(bytes(2 * size))
    for step in range(1, 10):
        save(slots, step, size=size)
    assert steps(job) == [3, 5, 9], "there is room for it, but not for as many copies again"
    (job.copies.path / "one").unlink()
    save(slots, 10, size=size)
    assert steps(job) == [3, 5, 9, 10]


def test_memory_of_copies_is_none_that_snapshots_can_use_again(small_tmpfs) -> None:
    job, room = JobDir.of(Path("/some/run"), memory_base(small_tmpfs(32 << 20))), Room(reserved=0)
    job.create()
    job.copies.path.mkdir()
    (job.copies.path / "one").write_bytes(bytes(8 << 20))
    free = job.free_bytes()
    assert room.describe_shortage(job, (free - (4 << 20)) // 2, 1) is None
    assert room.describe_shortage(job, (free + (4 << 20)) // 2, 1) is not None


# -- copies of another node's snapshots --------------------------------------------------------------------------------


def copies_in(job: JobDir) -> Slots:
    job.copies.create()
    return Slots(job.copies, 0, 1, [0], rule=lambda *args: keep_copies(job.notes, *args))


def test_of_copies_the_safe_one_stays_and_one_that_never_became_safe_is_written_over(job: JobDir) -> None:
    slots = copies_in(job)
    for step in (1, 2, 3):
        save(slots, step)
        assert step in steps(job.copies)
    note(job, 4, 3)
    for step in (4, 5, 6):
        slot = begin(slots, step)
        assert steps(job.copies) == [3]
        end(slots, slot, step)
        assert steps(job.copies) == [3, step] and len(files(job.copies)) == 2
    note(job, 7, 6)
    save(slots, 7)
    assert steps(job.copies) == [6, 7] and steps(job) == []


def test_a_copy_that_is_being_read_takes_one_slot_more_and_the_safe_one_is_never_written_over(small_tmpfs) -> None:
    job = JobDir.of(Path("/some/run"), memory_base(small_tmpfs(1 << 20)))
    job.create()
    slots, size = copies_in(job), 300_000
    note(job, 4, 3)
    for step in (3, 4):
        save(slots, step, size=size)
    with open_step(job.copies, 4):
        save(slots, 5, size=size)
        with open_step(job.copies, 5), pytest.raises(MemoryStoreError, match="no room"):
            slots.acquire(6, FIRST, size)
    assert steps(job.copies) == [3, 4, 5]
    assert_sound(job.copies, 3, size=size)


def test_the_stamp_of_a_copy_may_ask_for_storage(job: JobDir) -> None:
    """It is the other node that brings it there: nothing here waits for that."""
    slots = copies_in(job)
    for step in range(1, 9):
        stamp = ShardId(step, 0, 1, FIRST, True, pinned=True)
        slots.commit(begin(slots, step), stamp, make_shard(stamp, {"x": content(step)})[0].raw)
    assert steps(job.copies) == [7, 8] and len(files(job.copies)) == 2
