"""Slots: written in place, committed by rename, recycled, and never taken from under a reader."""

from __future__ import annotations

import os
import shutil
from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rekindle.errors import MemoryStoreError
from rekindle.format.lineage import Incarnation, ShardId
from rekindle.memory.job import JobInfo
from rekindle.memory.job_dir import JobDir
from rekindle.memory.slot import Slot
from rekindle.memory.slots import Slots
from rekindle.storage.verify import verify_shard
from tests.conftest import make_shard
from tests.memory.saved import (
    FILE,
    FIRST,
    SIZE,
    alone,
    assert_sound,
    begin,
    content,
    end,
    files,
    open_step,
    save,
    steps,
)


def test_a_removed_directory_says_what_the_job_is_before_it_has_a_snapshot(job: JobDir) -> None:
    lock, known = job.lock_rank(0, 5.0), JobInfo("/run", [0], 1, 2, None, 60.0)
    job.write_job(known)
    slots = alone(job)
    save(slots, 1)
    shutil.rmtree(job.path)
    assert job.retake(lock)
    slots.recover()
    slot = begin(slots, 2)
    assert job.read_job() == known and steps(job) == []
    end(slots, slot, 2)
    assert steps(job) == [2]
    slots.close()
    lock.release()


def test_a_committed_snapshot_is_found_and_sound(job):
    slots = alone(job)
    save(slots, 1)
    assert steps(job) == [1]
    assert_sound(job, 1)


def test_a_step_that_an_earlier_start_has_saved_too(job):
    """While the drain holds the older one; the saves after it find every file where it is."""
    slots = alone(job)
    save(slots, 7)
    save(slots, 8)
    slots.close()
    slots = alone(job)
    slots.adopt()
    again = Incarnation(2, "b" * 16, FIRST.id, 8)
    with open_step(job, 8):
        for step in range(8, 14):
            save(slots, step, again)
            assert_sound(job, step)
    for step in range(14, 20):
        save(slots, step, again)
    assert steps(job)[-2:] == [18, 19]
    assert len(files(job)) <= 3


def test_nothing_is_visible_before_the_commit(job):
    slots = alone(job)
    slot = begin(slots, 1)
    assert steps(job) == [] and not list(job.path.glob("step-*"))
    end(slots, slot, 1)
    assert steps(job) == [1]


def test_two_files_are_recycled_when_nobody_reads(job):
    slots = alone(job)
    slots.reserve(FILE)
    inodes = set()
    for step in range(1, 20):
        save(slots, step)
        assert_sound(job, step)
        assert step in steps(job) and len(steps(job)) <= 2
        inodes |= {path.stat().st_ino for path in files(job)}
    assert len(inodes) == 2
    assert job.held_bytes() <= 2 * (FILE + 3 * 4096)
    assert len(list(job.path.glob("step-*"))) == 2, "a recycled step's directory goes with it"


def test_a_recycled_step_is_not_found_any_more(job):
    slots = alone(job)
    for step in (1, 2, 3):
        save(slots, step)
    with pytest.raises(FileNotFoundError):
        open_step(job, 1)


def test_a_slot_grows_and_shrinks_with_the_state(job):
    slots = alone(job)
    for step, size in enumerate([SIZE, 3 * SIZE, 10, 3 * SIZE, SIZE], start=1):
        save(slots, step, size=size)
        assert_sound(job, step, size=size)


def test_saving_a_step_again_replaces_it(job):
    slots = alone(job)
    save(slots, 1)
    save(slots, 1)
    assert steps(job) == [1]
    assert_sound(job, 1)


def test_an_abandoned_save_leaves_nothing_visible_and_its_slot_is_used_again(job):
    slots = alone(job)
    save(slots, 1)
    begin(slots, 2)
    slots.recover()
    assert steps(job) == [1]
    save(slots, 2)
    assert steps(job) == [1, 2] and len(files(job)) == 2


def test_a_receipt_can_be_replaced_in_place(job):
    slots = alone(job)
    save(slots, 1, persist=False)
    stamp = ShardId(1, 0, 1, FIRST, persist=True)
    slots.write_receipt(stamp, make_shard(stamp, {"x": content(1)})[0].raw)
    assert [stamp.persist for stamp, _ in job.snapshots.shard_ids()] == [True]
    assert_sound(job, 1)


def test_closing_gives_the_memory_back_only_when_asked_to(job):
    slots = alone(job)
    save(slots, 1)
    slots.close()
    assert_sound(job, 1)
    again = alone(job)
    again.adopt()
    again.close()
    again.job.snapshots.remove(again.rank)
    assert steps(job) == [] and files(job) == []


@pytest.mark.parametrize("limit", [None, 2 * FILE + 100])
def test_the_newest_step_that_all_mates_have_is_never_recycled(job, limit):
    fast, slow = (Slots(job, rank, 2, [0, 1], limit) for rank in (0, 1))
    for step in (1, 2):
        save(fast, step)
        save(slow, step)
    for step in range(3, 10):  # the mate hangs in step 3
        slot = begin(fast, step)
        assert_sound(job, 2, 0, 2)
        end(fast, slot, step)
        assert steps(job)[-1] == step
    assert_sound(job, 2, 0, 2)
    assert_sound(job, 2, 1, 2)


def test_leaving_a_directory_that_a_mate_is_in_leaves_it_there(job):
    fast, slow = (Slots(job, rank, 2, [0, 1]) for rank in (0, 1))
    for step in (1, 2, 3):
        save(fast, step)
    for step in (1, 2, 3):
        save(slow, step)
    assert 3 in steps(job, 0) and 3 in steps(job, 1)
    assert_sound(job, 3, 0, 2)
    assert_sound(job, 3, 1, 2)


operations = st.lists(
    st.tuples(st.sampled_from(["save", "save", "save", "pin", "unpin", "durable"]), st.integers(0, 1), st.booleans()),
    max_size=30,
)


@settings(max_examples=80)
@given(operations, st.sampled_from([None, 2, 3]))
def test_whatever_happens_a_complete_snapshot_stays_and_pinned_bytes_do_not_change(tmp_path_factory, operations, room):
    """Two ranks save at their own pace while readers come and go."""
    job = JobDir(tmp_path_factory.mktemp("memory") / "base" / "job")
    job.create()
    limit = None if room is None else room * FILE + 100
    ranks = [Slots(job, rank, 2, [0, 1], limit) for rank in (0, 1)]
    at, pins = [0, 0], []

    def complete() -> set[int]:
        return set(steps(job, 0)) & set(steps(job, 1))

    def check(had: set[int]) -> None:
        assert complete() or not had, "the last complete snapshot is gone"
        for rank in (0, 1):
            assert len(files(job, rank)) <= min(3, room or 3)
        for shard in pins:
            view, problems = shard.map(), verify_shard(shard)
            assert not problems
            view.release()

    try:
        for what, rank, flag in operations:
            had = complete()
            if what == "save":
                if at[rank] > at[1 - rank] + 2:
                    continue  # no rank gets further ahead: they compute together
                step = at[rank] + 1
                try:
                    slot = begin(ranks[rank], step)
                except MemoryStoreError:
                    assert room or pins
                    check(had)
                    continue
                check(had)
                end(ranks[rank], slot, step, persist=flag)
                at[rank] = step
                assert step in steps(job, rank)
                assert_sound(job, step, rank, 2)
            elif what == "pin" and steps(job, rank):
                pins.append(open_step(job, steps(job, rank)[-1 if flag else 0], rank, 2))
            elif what == "unpin" and pins:
                pins.pop(-1 if flag else 0).close()
            elif what == "durable" and complete():
                job.notes.write_durable(max(complete()))
            check(had)
    finally:
        for shard in pins:
            shard.close()
        for slots in ranks:
            slots.close()
            slots.job.snapshots.remove(slots.rank)


@pytest.mark.parametrize("again", [True, False])
@pytest.mark.parametrize("at", [1, 2])
def test_a_recovery_that_ctrl_c_breaks_off_closes_no_file_of_others_and_costs_no_memory(job, monkeypatch, again, at):
    slots = alone(job)
    for step in (1, 2):
        save(slots, step)
    close, calls = Slot.close, []

    def interrupted(slot: Slot) -> None:
        close(slot)
        calls.append(slot)
        if len(calls) == at:
            raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Slot, "close", interrupted)
        with pytest.raises(KeyboardInterrupt):
            slots.recover()
    others = [os.open(os.devnull, os.O_RDONLY) for _ in range(at)]  # under the numbers that have become free
    try:
        if again:
            slots.recover()
        save(slots, 3)
        assert all(os.path.samestat(os.fstat(fd), os.stat(os.devnull)) for fd in others)
    finally:
        for fd in others:
            with suppress(OSError):
                os.close(fd)
    assert steps(job)[-1] == 3
    assert len(files(job)) == 2
    slots.close()
    slots.close()
