"""Copies that are stuck when a fault comes: the step is secured by others, and what they leave behind harms nobody."""

from __future__ import annotations

import mmap
import threading
from pathlib import Path

import pytest

from rekindle.errors import RekindleError
from rekindle.format.lineage import ShardId
from rekindle.save.pending import PendingSnapshot
from rekindle.save.plan import CopyPlan
from rekindle.save.to_memory import MemorySaver
from tests.devices.fake import DEVICE, FakeBackend
from tests.devices.faulty import Job
from tests.devices.test_steps import wait_until

_LONG = 60.0


def _memory(job: Job) -> MemorySaver:
    memory = job.ckpt._saver.memory
    assert memory is not None
    return memory


def _begin_stuck_snapshot(job: Job) -> tuple[threading.Event, PendingSnapshot]:
    """Queue step 3, whose snapshot's side stream is stuck. Returns what frees it, and the snapshot."""
    for _ in range(2):
        job.step()
    job.device.settle()
    job.ckpt._saver.conclude()
    with job.device.on(job.ckpt._saver.live.writer.streams._streams[DEVICE]):
        release = job.device.stick()
    job.step()
    wait_until(lambda: job.ckpt._saver.live.clock.standing() == 3)
    pending = _memory(job).pending
    assert pending is not None
    return release, pending


@pytest.mark.parametrize("threads_left", [True, False])
@pytest.mark.parametrize("also_training", [False, True])
def test_a_step_whose_snapshot_is_stuck_is_read_by_other_streams(
    device: FakeBackend,
    root: Path,
    memory: Path,
    monkeypatch: pytest.MonkeyPatch,
    also_training: bool,
    threads_left: bool,
) -> None:
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name == "rekindle-commit":
            raise RuntimeError("can't start new thread")
        start(thread)

    job = Job(device, root, memory, snapshot_every=1)
    with job.guarded() as guard:
        _, pending = _begin_stuck_snapshot(job)
        if also_training:
            job.training.forward()
            device.stick()
        if not threads_left:
            monkeypatch.setattr(threading.Thread, "start", refuse)
        gasp = job.fault(guard)
        gasp.join(_LONG / 2)  # and far less than a copy may take
        assert not gasp.is_alive() and not pending.committed
        job.check(3)


def test_a_snapshot_that_was_given_up_is_not_committed_and_its_slot_is_not_used_again(
    device: FakeBackend, root: Path, memory: Path
) -> None:
    job = Job(device, root, memory, snapshot_every=1)
    with job.guarded() as guard:
        release, pending = _begin_stuck_snapshot(job)
        job.fault(guard).join(_LONG)
        job.check(3)
        release.set()  # now it lands
        wait_until(lambda: pending._ended)
        assert not pending.committed and "given up" in str(pending.error)
        job.check(3)
        slots, start = _memory(job).slots, pending.stamp.incarnation
        assert slots.acquire(4, start, pending.plan.layout.file_bytes, gasp=True) is not pending.slot


def test_bytes_that_a_failed_attempt_leaves_behind_land_in_no_snapshot(
    device: FakeBackend, root: Path, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A helper of the attempt that failed writes after the next attempt has."""
    job = Job(device, root, memory)
    written: list[memoryview] = []
    with job.guarded():
        job.step()
        device.settle()
        live, write = job.ckpt._saver.live, job.ckpt._saver.live.write

        def fail_first(stamp: ShardId, plan: CopyPlan, buffer: mmap.mmap) -> bytes:
            written.append(memoryview(buffer)[: plan.layout.file_bytes])  # the mapping may be longer than the file
            if len(written) == 1:
                raise RekindleError("a batch could not be copied")
            return write(stamp, plan, buffer)

        monkeypatch.setattr(live, "write", fail_first)
        stamp = job.ckpt._session.shard_id(1)
        with pytest.raises(RekindleError, match="could not be copied"):
            _memory(job).gasp(stamp, whole=True)
        _memory(job).gasp(stamp, whole=True)
        written[0][:] = bytes([0xFF]) * len(written[0])
        job.check(1)
