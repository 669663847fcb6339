"""The device decides which step a fault's survivors secure, however far ahead of it the host is."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rekindle.devices import bounce
from rekindle.faults.late_work import late_work_counts
from rekindle.faults.nccl import SETTINGS
from rekindle.memory.fault import Fault
from rekindle.memory.local_state import LocalState, read_local_files
from rekindle.save import local_state, plan
from rekindle.save.copy import Copying
from rekindle.save.plan import Unit
from rekindle.save.progress import KEPT
from tests.devices.fake import KIND, FakeBackend, install
from tests.devices.faulty import Job, check_shard
from tests.devices.training import Training
from tests.faults.peer import be_overtaken
from tests.save.overlapped import snapshot_of

_LONG = 60.0


def local_states(job: Job) -> list[LocalState]:
    files = read_local_files(job.dir.paths, 0)
    return [] if files is None else files.states


def wait_until(reached: Callable[[], object]) -> None:
    deadline = time.monotonic() + _LONG
    while not reached():
        assert time.monotonic() < deadline
        time.sleep(0.002)


# -- which step it is -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("ahead", "every"), [(0, 10**9), (1, 10**9), (2, 10**9), (3, 10**9), (0, 1), (1, 1)])
def test_a_stuck_device_holds_the_step_before(
    device: FakeBackend, root: Path, memory: Path, ahead: int, every: int
) -> None:
    """The host has completed later steps than the device, which waits for a dead rank.

    Where each step has a snapshot, the host gets one ahead: the next ``step()`` waits for the one before.
    """
    job = Job(device, root, memory, snapshot_every=every)
    with job.guarded() as guard:
        for _ in range(3):
            job.step()
        for number in range(ahead):
            job.step(threading.Event() if number == 0 else None)
        job.fault(guard).join(_LONG)
        job.check(3)
        assert max(job.in_memory()) == 3


@pytest.mark.parametrize("ahead", [1, 2, 3, 4])
def test_a_stuck_device_holds_a_step_of_several_updates(
    device: FakeBackend, root: Path, memory: Path, ahead: int
) -> None:
    """Only every third update is told to step(); the host is as far ahead by told steps as it may be."""
    job = Job(device, root, memory)
    with job.guarded() as guard:
        for _ in range(3):
            job.step(updates=3)
        job.step(threading.Event(), updates=3)
        if ahead < KEPT:
            for _ in range(ahead - 1):
                job.step(updates=3)
        else:
            job.train(9, updates=3)
            wait_until(lambda: job.done == 9 + 3 * KEPT)
        job.fault(guard).join(_LONG)
        job.check(9)


def test_a_host_that_is_stuck_in_its_update_or_step_is_not_waited_for(
    device: FakeBackend, root: Path, memory: Path
) -> None:
    """It waits inside of step() for the device, which stays where it is: the state is complete."""
    job = Job(device, root, memory)
    with job.guarded() as guard:
        job.step()
        job.step(threading.Event())
        job.train(9)
        wait_until(lambda: job.done == 5)
        job.fault(guard).join(_LONG)
        job.check(1)
        assert job.done == 5, "the host gets no further ahead than local states are kept"


@pytest.mark.parametrize("cores", [1, 8])
def test_copies_that_are_stuck_leave_the_rescue_its_own_buffers(
    device: FakeBackend, root: Path, memory: Path, cores: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The memory can't be page-locked. The update waits, with as many threads as there are cores, for a snapshot."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)))
    monkeypatch.setattr(plan, "DEVICE_BATCH", 1)
    device.fail_register = 1
    training = Training(device, size=10_000, layers=12, buffer=False)
    job = Job(device, root, memory, training, snapshot_every=2, strict=False)
    with job.guarded() as guard:
        for _ in range(3):
            job.step()
        job.ckpt._saver.conclude()
        device.settle()
        job.step(threading.Event())
        job.train(1)
        wait_until(lambda: device.under_way >= min(cores, bounce._BUFFERS))
        job.fault(guard).join(_LONG)
        assert guard._gate._page.secured == 3
        job.check(3)


def test_a_device_that_goes_on_brings_the_step_that_the_host_has_completed(
    device: FakeBackend, root: Path, memory: Path
) -> None:
    job = Job(device, root, memory)
    device.slowness = 0.02
    with job.guarded() as guard:
        for _ in range(5):
            job.step()
        job.fault(guard, "exception", "rank 0 raised ValueError").join(_LONG)
        job.check(5)


@pytest.mark.parametrize("phase", ["update", "step"])
def test_an_update_that_has_begun_is_waited_for(
    device: FakeBackend, root: Path, memory: Path, phase: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host has queued only a part of the update, or all of it but not the step's end."""
    job = Job(device, root, memory)
    with job.guarded() as guard:
        job.step()
        job.training.forward()
        if phase == "step":
            job.training.optimizer.step()
        else:
            job.ckpt._saver.wait_before_update()
        device.settle()
        waits, seize = threading.Event(), guard._gate.seize

        def note(timeout: float, beyond: int = -1) -> int | None:
            waits.set()
            return seize(timeout, beyond)

        monkeypatch.setattr(guard._gate, "seize", note)
        gasp = job.fault(guard)
        assert waits.wait(_LONG)
        gasp.join(0.2)
        assert gasp.is_alive() and job.in_memory() == []
        if phase == "update":
            job.training.optimizer.step()
        job.end()
        gasp.join(_LONG)
        job.check(2)


def test_an_update_that_does_not_end_is_told_of_as_the_device_s(
    device: FakeBackend, root: Path, memory: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The host may be steps ahead of it."""
    monkeypatch.setattr("rekindle.faults.gasp._UPDATE", 0.2)
    job = Job(device, root, memory)
    with job.guarded() as guard:
        job.step()
        job.training.forward()
        job.ckpt._saver.wait_before_update()
        device.stick()
        job.training.optimizer.step()
        job.end()
        wait_until(lambda: job.ckpt._saver.live.clock.standing() is None)
        job.fault(guard).join(_LONG)
        assert "its device was inside of an update, and did not end it; the host was at step 2" in caplog.text


def test_an_update_that_begins_while_the_state_is_read_makes_that_worthless(
    device: FakeBackend, root: Path, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Job(device, root, memory)
    held, finish = threading.Event(), Copying.finish

    def finish_late(self: Copying) -> list[str]:
        found = finish(self)
        if threading.current_thread().name == "gasp" and not held.is_set():
            held.set()
            device.settle()
        return found

    monkeypatch.setattr(Copying, "finish", finish_late)
    with job.guarded() as guard:
        job.step()
        job.step(held)
        job.fault(guard).join(_LONG)
        job.check(2)
        assert job.in_memory() == [2]


def test_a_rank_goes_on_to_a_step_of_which_another_has_its_only_copy(
    device: FakeBackend, root: Path, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rekindle.faults.gasp._CATCH_UP", _LONG)
    job = Job(device, root, memory)
    with job.guarded() as guard:
        for _ in range(3):
            job.step()
        device.settle()
        be_overtaken(job.ckpt, guard, lambda: job.train(1).join(_LONG), lambda: job.fault(guard))
        check_shard(snapshot_of(job.dir, 4), job.training, 4)


# -- what counts after a fault --------------------------------------------------------------------------------------


@pytest.mark.parametrize("every", [10**9, 1])
def test_what_an_abort_lets_through_is_refused(device: FakeBackend, root: Path, memory: Path, every: int) -> None:
    """The abort of a communicator ends the collective, and the update behind it goes on with what it finds."""
    job = Job(device, root, memory, snapshot_every=every)
    held = threading.Event()

    def abort(_: object) -> None:
        held.set()
        device.settle()

    with job.guarded() as guard:
        for _ in range(2):
            job.step()
        job.step(held)
        guard._gate.freeze(late=True)
        guard._gate.distrust()
        abort(None)
        job.fault(guard).join(_LONG)
        assert job.in_memory()[-1:] == ([2] if every == 1 else [])
        job.ckpt._saver.memory.wait_for_newest(_LONG)  # type: ignore[union-attr]
        assert 3 not in job.in_memory()
        assert all(state.stamp.step < 3 for state in local_states(job)), "it would be used for a successor"


def test_an_abort_by_somebody_else_is_refused(
    device: FakeBackend, root: Path, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch's watchdog of NCCL may abort at any time after a death: then only what was reached before counts."""
    monkeypatch.setattr("rekindle.faults.late_work.aborts_by_itself", lambda: True)
    job = Job(device, root, memory, snapshot_every=2)
    held = threading.Event()
    with job.guarded() as guard:
        for _ in range(2):
            job.step()
        job.ckpt._saver.conclude()
        job.step(held)
        gasp = job.fault(guard)
        wait_until(lambda: job.ckpt._saver.live.clock.frozen)
        held.set()
        gasp.join(_LONG)
        assert job.in_memory() == [2]
        job.check(2)


def test_a_collective_before_a_second_optimizer_had_not_been_passed(
    device: FakeBackend, root: Path, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of a generator, after its discriminator's update had begun: its gradients are what an abort has left."""
    monkeypatch.setattr("rekindle.faults.late_work.aborts_by_itself", lambda: True)
    job = Job(device, root, memory, snapshot_every=2)
    with job.guarded() as guard:
        for _ in range(2):
            job.step()
        job.ckpt._saver.conclude()
        job.training.update()
        held = device.stick()
        job.training.update()
        job.end()
        wait_until(lambda: job.ckpt._saver.live.clock.standing() is None)
        gasp = job.fault(guard)
        wait_until(lambda: job.ckpt._saver.live.clock.frozen)
        held.set()
        gasp.join(_LONG)
        assert job.in_memory() == [2]
        job.check(2)


@pytest.mark.parametrize(
    ("backends", "handled", "aborts"),
    [
        (None, "", False),
        (f"cpu:gloo,{KIND}:gloo", "", False),
        ("cpu:gloo,cuda:nccl,xpu:xccl", "0", False),
        ("cpu:gloo,cuda:nccl,xpu:xccl", "", True),
        (f"cpu:gloo,{KIND}:hccl", "0", True),
    ],
)
def test_backends_that_may_abort_by_themselves(
    device: FakeBackend, monkeypatch: pytest.MonkeyPatch, backends: str | None, handled: str, aborts: bool
) -> None:
    """Those of other kinds of devices than this process's are only names in a list."""
    monkeypatch.setattr(dist, "is_initialized", lambda: backends is not None)
    monkeypatch.setattr(dist, "get_backend_config", lambda group=None: backends)
    monkeypatch.setenv(SETTINGS[0], handled)
    killed = Fault("signal", 0, 1, 5, "rank 1 was killed")
    assert late_work_counts(killed) == (not aborts)


@pytest.mark.parametrize("what", ["rank 1 raised DistBackendError: aborted", "rank 1 raised OSError"])
def test_an_error_of_a_collective_may_be_an_abort(what: str, device: FakeBackend, root: Path, memory: Path) -> None:
    job = Job(device, root, memory)
    with job.guarded() as guard:
        job.step()
        job.step(threading.Event())
        wait_until(lambda: job.ckpt._saver.live.clock.standing() == 1)
        job.fault(guard, "exception", what).join(_LONG)
        assert job.ckpt._saver.live.clock.counts(2) == ("OSError" in what)
        job.check(1)


# -- what the host has ----------------------------------------------------------------------------------------------


def test_tensors_too_large_to_be_kept_can_be_secured_only_where_the_host_is(
    device: FakeBackend,
    root: Path,
    memory: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The optimizer keeps a moment in the host's memory, which is of a later step than the parameters."""
    monkeypatch.setattr("rekindle.faults.gasp._UPDATE", 0.5)
    job = Job(device, root, memory)
    large = torch.zeros(1 << 19)  # 2 MiB
    job.training.optimizer.state[job.training.model.weight]["offloaded"] = large
    with job.guarded() as guard:
        job.step()
        job.training.forward()
        device.stick()
        job.training.optimizer.step()
        large += 1
        job.end()
        job.fault(guard).join(_LONG)
        assert job.in_memory() == []
    assert "offloaded has been changed since the end of step 1, and is too large to be kept" in caplog.text


def test_a_device_may_be_behind_for_longer_than_any_bound(
    device: FakeBackend, root: Path, memory: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host waits, as far ahead as local states are kept. No step fails."""
    monkeypatch.setattr(local_state, "_LOOK", 0.01)
    job = Job(device, root, memory)
    held = threading.Event()
    with caplog.at_level(logging.INFO), job.guarded():
        job.step(held)
        trainer = job.train(9)
        wait_until(lambda: job.done == 4)
        trainer.join(0.3)
        assert job.done == 4 and trainer.is_alive()
        held.set()
        trainer.join(_LONG)
        assert job.done == 10
    assert "secured" not in caplog.text


def test_local_states_are_read_when_the_device_has_copied_them(device: FakeBackend, root: Path, memory: Path) -> None:
    """A dead rank's successor gets them, by a checksum that also holds for what was read too early."""
    job = Job(device, root, memory)
    device.slowness = 0.004
    with job.guarded():
        for _ in range(30):
            job.step()
        wait_until(lambda: [state.stamp.step for state in local_states(job)] == [30, 29])
        for state in local_states(job):
            seen = torch.frombuffer(bytearray(state.tensors), dtype=torch.uint8)[: 64 * 4].view(torch.float32)
            assert torch.equal(seen, torch.full((64,), float(state.stamp.step)))


# -- a device that fails --------------------------------------------------------------------------------------------


def test_a_failed_device_leaves_the_newest_snapshot(
    device: FakeBackend, root: Path, memory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    job = Job(device, root, memory, snapshot_every=1)
    with job.guarded() as guard:
        for _ in range(3):
            job.step()
        job.ckpt._saver.conclude()
        device.lost = "an assertion in a kernel"
        job.fault(guard).join(_LONG)
        assert guard._gate._page.secured == 3
        job.check(3)
    assert "step 3 secured" in caplog.text


def test_a_snapshot_that_was_copied_before_the_device_failed_is_good(
    device: FakeBackend, root: Path, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is still being hashed when the device fails, and asked for when its memory can't be read any more."""
    hashing, go_on, hash_unit = threading.Event(), threading.Event(), Copying._hash_unit

    def hash_late(self: Copying, unit: Unit) -> None:
        if unit.nbytes > 1000:  # of the last batch, all of which the device has copied
            hashing.set()
            go_on.wait(_LONG)
        hash_unit(self, unit)

    job = Job(device, root, memory, snapshot_every=2)
    with job.guarded() as guard:
        job.step()
        monkeypatch.setattr(Copying, "_hash_unit", hash_late)
        job.step()
        assert hashing.wait(_LONG)
        device.settle()
        wait_until(lambda: job.ckpt._saver.live.clock.standing() == 2)
        device.lost = "an assertion in a kernel"
        gasp = job.fault(guard)
        go_on.set()
        gasp.join(_LONG)
        assert guard._gate._page.secured == 2
        job.check(2)


# -- any delays -----------------------------------------------------------------------------------------------------


@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    seed=st.integers(0, 2**32 - 1),
    slowness=st.sampled_from([0.0, 0.001, 0.005]),
    before=st.integers(1, 4),
    ahead=st.integers(0, 3),
    every=st.sampled_from([1, 3, 10**9]),
    stuck=st.sampled_from(["before the update", "never"]),
    cause=st.sampled_from(["signal", "exception"]),
)
def test_any_delays(
    tmp_path_factory: pytest.TempPathFactory,
    memory: Path,
    seed: int,
    slowness: float,
    before: int,
    ahead: int,
    every: int,
    stuck: str,
    cause: str,
) -> None:
    """Whatever is in memory after a fault is of one step, and the newest that the device could come to is there."""
    device = FakeBackend(seed, slowness)
    with pytest.MonkeyPatch.context() as patch:
        install(patch, device)
        patch.setattr("rekindle.faults.gasp._CATCH_UP", 0.2)
        job = Job(device, tmp_path_factory.mktemp("root"), memory, snapshot_every=every)
        with job.guarded() as guard:
            for _ in range(before):
                job.step()
            ahead = ahead if every > before + ahead else min(ahead, 1)
            for number in range(ahead):
                job.step(threading.Event() if stuck != "never" and number == 0 else None)
            job.fault(guard, cause).join(_LONG)
            job.check(before if stuck != "never" else before + ahead)
            for step in job.in_memory():
                job.check(step)
    assert not device.complaints
