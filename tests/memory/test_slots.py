"""Slots: written in place, committed by rename, recycled, and never taken from under a reader."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rekindle.errors import MemoryStoreError
from rekindle.format.lineage import Incarnation, ShardId
from rekindle.format.names import receipt_name, shard_name, step_dir
from rekindle.format.shard import OpenShard
from rekindle.memory.job import JobInfo
from rekindle.memory.job_dir import JobDir, memory_base
from rekindle.memory.slots import Slot, Slots
from rekindle.storage.verify import verify_shard
from tests.conftest import make_shard

FIRST = Incarnation(1, "a" * 16)
SIZE = 50_000
FILE = 4096 + SIZE


def content(step: int, rank: int = 0, size: int = SIZE) -> bytes:
    return (b"step %d rank %d. " % (step, rank) * size)[:size]


@pytest.fixture
def job(memory: Path, root: Path) -> JobDir:
    job = JobDir.of(root, memory_base())
    job.create()
    return job


def begin(slots: Slots, step: int, incarnation: Incarnation = FIRST, size: int = SIZE) -> Slot:
    """Everything of a save but its commit."""
    receipt, data = make_shard(
        ShardId(step, slots.rank, slots.world, incarnation), {"x": content(step, slots.rank, size)}
    )
    slot = slots.acquire(step, incarnation, receipt.file_bytes)
    slot.map[: len(data)] = data  # the mapping may be longer than the file
    return slot


def end(slots: Slots, slot: Slot, step: int, incarnation: Incarnation = FIRST, size: int = SIZE, persist=True) -> None:
    stamp = ShardId(step, slots.rank, slots.world, incarnation, persist)
    slots.commit(slot, stamp, make_shard(stamp, {"x": content(step, slots.rank, size)})[0].raw)


def save(slots: Slots, step: int, incarnation: Incarnation = FIRST, size: int = SIZE, persist: bool = True) -> None:
    end(slots, begin(slots, step, incarnation, size), step, incarnation, size, persist)


def steps(job: JobDir, rank: int = 0) -> list[int]:
    return sorted(stamp.step for stamp, _ in job.snapshots.shard_ids() if stamp.rank == rank)


def files(job: JobDir, rank: int = 0) -> list[Path]:
    return job.snapshots.rank_files(rank)


def open_step(job: JobDir, step: int, rank: int = 0, world: int = 1) -> OpenShard:
    return OpenShard.open(job.path / step_dir(step) / receipt_name(rank, world), in_memory=True)


def assert_sound(job: JobDir, step: int, rank: int = 0, world: int = 1, size: int = SIZE) -> None:
    with open_step(job, step, rank, world) as shard:
        view, problems = shard.map(), verify_shard(shard)
        assert not problems and shard.receipt.stamp.step == step
        assert bytes(view[shard.receipt.header_bytes :]) == content(step, rank, size)


def alone(job: JobDir, limit: int | None = None) -> Slots:
    return Slots(job, 0, 1, [0], limit)


# -- saving and recycling --------------------------------------------------------------------------------------------


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


# -- after the process is gone ---------------------------------------------------------------------------------------


def test_a_successor_adopts_snapshots_and_files(job):
    slots = alone(job)
    for step in (1, 2):
        save(slots, step)
    slots.close()
    successor = alone(job)
    successor.adopt()
    assert sorted(slot.stamp.step for slot in successor.slots) == [1, 2]
    second = Incarnation(2, "b" * 16, FIRST.id, 2)
    save(successor, 3, second)
    assert_sound(job, 2)
    assert_sound(job, 3)
    assert len(files(job)) == 2, "the files of the dead are used again"


DIE = """
import os, signal, sys
from pathlib import Path
from rekindle.format.lineage import Incarnation
from rekindle.memory.job_dir import JobDir
from rekindle.memory.slots import Slots
from tests.memory.test_slots import alone, begin, save
slots = alone(JobDir(Path(sys.argv[1])))
for step in (1, 2, 3):
    save(slots, step)
slot = begin(slots, 4)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_writer_killed_in_the_middle_leaves_the_step_before_and_a_file_to_use(job):
    here = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", DIE, str(job.path)], cwd=here, check=False)
    assert done.returncode == -signal.SIGKILL
    assert steps(job) == [3]
    assert_sound(job, 3)
    successor = alone(job)
    successor.adopt()
    assert len(successor.slots) == 2
    save(successor, 4, Incarnation(2, "b" * 16, FIRST.id, 3))
    assert steps(job) == [3, 4] and len(files(job)) == 2
    assert_sound(job, 4)


def test_a_shard_without_a_receipt_is_a_free_file(job):
    slots = alone(job)
    save(slots, 1)
    save(slots, 2)
    (job.path / step_dir(2) / receipt_name(0, 1)).unlink()
    (job.path / step_dir(2) / f".{receipt_name(0, 1)}.tmp").write_bytes(b'{"digest":"')
    slots.close()
    successor = alone(job)
    successor.adopt()
    assert [slot.stamp.step if slot.stamp else None for slot in successor.slots].count(None) == 1
    save(successor, 3, Incarnation(2, "b" * 16, FIRST.id, 1))
    assert steps(job) == [1, 3] and len(files(job)) == 2
    assert not list(job.path.rglob("*.tmp"))


def test_a_successor_uncommits_what_it_left_behind_before_it_writes(job):
    """The run went back to step 3, so steps 4 and 5 are no longer part of its past."""
    slots = Slots(job, 0, 1, [0])
    with ExitStack() as pins:
        for step in (3, 4, 5):
            save(slots, step)
            pins.enter_context(open_step(job, step))  # so that all three stay
    assert steps(job) == [3, 4, 5]
    slots.close()
    successor = alone(job)
    successor.adopt()
    second = Incarnation(2, "b" * 16, FIRST.id, 3)
    slot = begin(successor, 4, second)
    assert steps(job) == [3]
    end(successor, slot, 4, second)
    assert [
        (s.step, s.incarnation.generation) for s, _ in sorted(job.snapshots.shard_ids(), key=lambda e: e[0].step)
    ] == [
        (3, 1),
        (4, 2),
    ]


def test_adopting_alone_takes_nothing_away(job):
    slots = alone(job)
    for step in (4, 5):
        save(slots, step)
    slots.close()
    successor = alone(job)
    successor.adopt()
    successor.reserve(FILE)
    successor.ready()
    assert steps(job) == [4, 5]
    assert_sound(job, 4)
    assert_sound(job, 5)


# -- readers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [None, 2 * FILE + 100, 3 * FILE + 100])
def test_a_slow_reader_reads_the_bytes_it_opened_while_recycling_takes_other_files(job, limit):
    slots = alone(job, limit)
    save(slots, 1)
    pinned = open_step(job, 1)
    inode = os.fstat(pinned.fd).st_ino
    for step in range(2, 12):
        slot = begin(slots, step)
        assert os.fstat(slot.fd).st_ino != inode
        end(slots, slot, step)
        assert_sound(job, step)
        view, problems = pinned.map(), verify_shard(pinned)
        assert not problems
        assert bytes(view[pinned.receipt.header_bytes :]) == content(1)
        view.release()
        assert len(files(job)) <= 3
    pinned.close()
    for step in range(12, 40):
        save(slots, step)
    assert inode in {path.stat().st_ino for path in files(job)} or len(files(job)) == 2
    assert len(files(job)) == 2, "the third file goes when nobody has needed it for a while"


def test_a_mapped_shard_stays_pinned_after_its_file_was_closed(job):
    slots = alone(job)
    save(slots, 1)
    with open_step(job, 1) as shard:
        view, base = shard.map(), shard.receipt.header_bytes
    for step in range(2, 8):
        save(slots, step)
        assert bytes(view[base:]) == content(1)
    view.release()


READ_SLOWLY = """
import sys
from pathlib import Path
from rekindle.memory.job_dir import JobDir
from rekindle.storage.verify import verify_shard
from tests.memory.test_slots import content, open_step
shard = open_step(JobDir(Path(sys.argv[1])), 1)
print("open", flush=True)
sys.stdin.readline()
view, problems = shard.map(), verify_shard(shard)
assert not problems
assert bytes(view[shard.receipt.header_bytes :]) == content(1)
print("sound", flush=True)
"""


def test_a_reader_in_another_process_is_safe_too_and_its_death_frees_the_file(job):
    slots = alone(job)
    save(slots, 1)
    with subprocess.Popen(
        [sys.executable, "-c", READ_SLOWLY, str(job.path)],
        cwd=Path(__file__).parents[2],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as reader:
        assert reader.stdout.readline() == "open\n"
        for step in range(2, 9):
            save(slots, step)
        assert len(files(job)) == 3
        reader.stdin.write("go\n")
        reader.stdin.flush()
        assert reader.stdout.readline() == "sound\n"
    for step in range(9, 40):
        save(slots, step)
    assert len(files(job)) == 2


def test_a_file_being_written_can_not_be_opened(job):
    slots = alone(job)
    save(slots, 1)
    save(slots, 2)
    receipt = (job.path / step_dir(1) / receipt_name(0, 1)).read_bytes()
    slot = begin(slots, 3)  # takes step 1's file
    directory = job.path / step_dir(1)
    directory.mkdir()
    (directory / receipt_name(0, 1)).write_bytes(receipt)
    os.link(slot.path, directory / shard_name(0, 1))  # what a reader that was slow to start still has in hand
    with pytest.raises(FileNotFoundError):
        OpenShard.open(directory / receipt_name(0, 1), in_memory=True)


def test_a_reader_overtaken_between_receipt_and_shard_does_not_mix_the_two(job):
    """It has read the receipt of step 2 when a successor saves its own step 2 under the same name."""
    slots = alone(job)
    save(slots, 1)
    save(slots, 2)
    second = Incarnation(2, "b" * 16, FIRST.id, 1)

    class Overtaken(type(Path())):
        opened = 0

        def __fspath__(self) -> str:
            Overtaken.opened += 1
            if Overtaken.opened == 2:  # the receipt has been read, the shard comes next
                save(slots, 2, second)
            return super().__fspath__()

    with pytest.raises(FileNotFoundError):
        OpenShard.open(Overtaken(job.path / step_dir(2) / receipt_name(0, 1)), in_memory=True)
    assert Overtaken.opened >= 2
    assert_sound(job, 2)


def test_readers_do_not_disturb_each_other(job):
    slots = alone(job)
    save(slots, 1)
    with open_step(job, 1), open_step(job, 1) as second:
        assert not verify_shard(second)


# -- limits ----------------------------------------------------------------------------------------------------------


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
    assert [stamp.step for stamp in slots.to_pin(newest)] == [1, 2]
    for step in (3, 4, 5, 6):
        save(slots, step)
    assert steps(job)[0] == 1 and 2 not in steps(job) and len(files(job)) <= 4
    assert slots.to_pin(ShardId(1, 0, 1, FIRST)) == [], "older ones only"
    assert slots.to_pin(ShardId(9, 0, 1, Incarnation(2, "b" * 16, parent="a" * 16, parent_step=0))) == [], "abandoned"
    job.notes.write_durable(1)
    assert slots.to_pin(newest) == []
    pin(7)
    for step in (8, 9, 10):
        save(slots, step)
    assert 1 not in steps(job) and 7 in steps(job)


# -- several ranks on one node ---------------------------------------------------------------------------------------


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


# -- no room ---------------------------------------------------------------------------------------------------------


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
