"""The third slot: made ahead where there is room, when a drain asks for it, and given up where others need the room."""

from __future__ import annotations

from pathlib import Path

import pytest

from rekindle.format.lineage import ShardId
from rekindle.memory import thirds
from rekindle.memory.job_dir import JobDir, memory_base
from rekindle.memory.pages import AT_ONCE
from rekindle.memory.slots import Slots
from rekindle.memory.thirds import Thirds
from tests.conftest import commit, make_shard
from tests.memory.saved import FIRST, alone, files, steps

LARGE = AT_ONCE + 4096
"""Bytes of a snapshot for which a third slot is made ahead."""
SECONDS = 60.0


def job_in(path: Path) -> JobDir:
    job = JobDir.of(Path("/some/run"), memory_base(path))
    job.create()
    return job


def large(slots: Slots, step: int, *, persist: bool = False, nbytes: int = LARGE) -> None:
    stamp = ShardId(step, 0, slots.world, FIRST, persist)
    receipt, data = make_shard(stamp, {"x": bytes(nbytes - 4096)})
    commit(slots, receipt, data)


def two_snapshots(job: JobDir, limit: int | None = None) -> Slots:
    slots = alone(job, limit)
    for step in (1, 2):
        large(slots, step)
    assert len(files(job)) == 2
    return slots


def ready(slots: Slots) -> int:
    assert slots.wait_made(SECONDS)
    return sum(slot.ready(LARGE) for slot in slots.slots)


def test_it_is_there_before_the_first_drain(job: JobDir) -> None:
    slots = alone(job)
    slots.reserve(LARGE, ahead=True)
    assert ready(slots) == len(files(job)) == 3
    for step in range(1, 40):
        large(slots, step)
    assert ready(slots) == len(files(job)) == 2, "no drain needed it for long"
    slots.close()


def test_it_takes_no_room_that_others_need(job: JobDir, small_tmpfs) -> None:
    for where, limit, ranks in (
        (job_in(small_tmpfs(3 * LARGE)), None, [0]),  # not all of it is for snapshots
        (job_in(small_tmpfs(5 * LARGE)), None, [0, 1]),
        (job, 3 * LARGE - 1, [0]),
    ):
        slots = Slots(where, 0, len(ranks), ranks, limit)
        slots.reserve(LARGE, ahead=True)
        assert ready(slots) == len(files(where)) == 2
        slots.close()


def test_a_drain_that_asks_gets_it(job: JobDir) -> None:
    slots, notes = two_snapshots(job), Thirds(job.paths)
    slots.make_third(FIRST.id)
    assert len(files(job)) == 2, "nobody asked"
    notes.ask()
    slots.make_third(FIRST.id)
    assert ready(slots) == 3
    for step in range(3, 40):
        large(slots, step)
    assert len(files(job)) == 3, "it isn't dropped while the drain waits for it"
    slots.close()


def test_a_question_counts_for_a_while_only(job: JobDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(thirds, "_LATELY", 0.0)
    slots = two_snapshots(job)
    Thirds(job.paths).ask()
    slots.make_third(FIRST.id)
    assert len(files(job)) == 2
    slots.close()


def test_a_snapshot_that_storage_still_needs_asks_for_it_itself(job: JobDir) -> None:
    slots = two_snapshots(job)
    large(slots, 3, persist=True)
    slots.make_third(FIRST.id)
    assert ready(slots) == 3
    slots.close()


def test_a_rank_without_room_says_so_once(job: JobDir) -> None:
    slots, notes = two_snapshots(job, 2 * LARGE), Thirds(job.paths)
    notes.write_made(FIRST.id)
    assert notes.are_made(FIRST.id) and not notes.are_made("b" * 16)
    slots.make_third(FIRST.id)
    assert notes.are_made(FIRST.id), "nobody asked"
    notes.ask()
    slots.make_third(FIRST.id)
    assert not notes.are_made(FIRST.id) and len(files(job)) == 2
    slots.close()


def test_a_state_that_grows_takes_its_room(small_tmpfs) -> None:
    job = job_in(small_tmpfs(4 * LARGE))
    slots = alone(job)
    slots.reserve(LARGE, ahead=True)
    assert ready(slots) == 3
    for step in range(1, 5):
        large(slots, step, nbytes=LARGE + LARGE // 2 // 4096 * 4096)
    assert steps(job) == [3, 4] and len(files(job)) == 2
    slots.close()
