"""Readers pin what they read: recycling takes other files, also when a process was killed."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from rekindle.format.lineage import Incarnation
from rekindle.format.names import receipt_name, shard_name, step_dir
from rekindle.format.shard import OpenShard
from rekindle.memory.slots import Slots
from rekindle.storage.verify import verify_shard
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


def test_a_successor_adopts_snapshots_and_files(job):
    slots = alone(job)
    for step in (1, 2):
        save(slots, step)
    slots.close()
    successor = successor_of(job)
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
from tests.memory.saved import alone, begin, save
slots = alone(JobDir(Path(sys.argv[1])))
for step in (1, 2, 3):
    save(slots, step)
slot = begin(slots, 4)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_writer_killed_in_the_middle_leaves_the_step_before_and_a_file_to_use(job):
    run_until_killed(DIE, job)
    assert steps(job) == [3]
    assert_sound(job, 3)
    successor = successor_of(job)
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
    successor = successor_of(job)
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
    successor = successor_of(job)
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
    successor = successor_of(job)
    successor.reserve(FILE)
    assert successor.wait_made(30.0)
    assert steps(job) == [4, 5]
    assert_sound(job, 4)
    assert_sound(job, 5)


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


def test_a_third_file_that_nobody_needs_any_more_outlives_a_gasp(job, monkeypatch):
    """A page lock can't be given up beside a device that is stuck."""
    slots = alone(job)
    save(slots, 1)
    with open_step(job, 1):
        save(slots, 2)
        save(slots, 3)
    monkeypatch.setattr("rekindle.memory.slots._IDLE", 0)
    slots.acquire(4, FIRST, FILE, gasp=True).unlock()
    assert len(files(job)) == 3
    save(slots, 4)
    assert len(files(job)) == 2


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
from tests.memory.saved import content, open_step
shard = open_step(JobDir(Path(sys.argv[1])), 1)
print("open", flush=True)
sys.stdin.readline()
view, problems = shard.map(), verify_shard(shard)
assert not problems
assert bytes(view[shard.receipt.header_bytes :]) == content(1)
print("sound", flush=True)
"""


@pytest.mark.campaign(seconds=9)
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
