"""Devices are read after a fault by what was made before it, and stopped only where they can't be read otherwise."""

from __future__ import annotations

import logging
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

import rekindle
from rekindle.devices import rescue
from rekindle.faults.built_in import stop_hook
from rekindle.faults.guard import Guard
from tests.devices.fake import DEVICE, FakeBackend
from tests.devices.faulty import Job

_LONG = 60.0
HANGS = [False, pytest.param(True, marks=pytest.mark.campaign(seconds=7))]


def _train(device: FakeBackend, root: Path, memory: Path, **options: Any) -> Job:
    job = Job(device, root, memory, **options)
    (state,) = job.training.optimizer.state.values()
    state["moment"] = torch.zeros(2 * len(state["moment"]))[::2]  # not contiguous, and not read before the fault
    device.own(state["moment"])
    return job


def _streams(guard: Guard) -> list[Any]:
    return [line.stream for line in guard._rescue._probes[DEVICE]._lines]


def test_nothing_is_made_or_freed_after_a_fault(device: FakeBackend, root: Path, memory: Path) -> None:
    """Nor is a kernel used for the first time: the moment's elements have to be put in order."""
    job = _train(device, root, memory)
    with job.guarded() as guard:
        for _ in range(3):
            job.step()
        job.step(threading.Event())
        job.fault(guard).join(_LONG)
        job.check(3)


def test_the_first_stream_that_answers_is_taken(device: FakeBackend, root: Path, memory: Path) -> None:
    """A stream may wait behind what is stuck, for want of hardware queues."""
    job = _train(device, root, memory)
    stopped: list[object] = []
    with job.guarded(on_stop=stopped.append) as guard:
        for _ in range(3):
            job.step()
        job.step(threading.Event())
        *stuck, free = _streams(guard)
        for stream in stuck:
            with device.on(stream):
                device.stick()
        job.fault(guard).join(_LONG)
        assert guard._rescue.streams() == {DEVICE: free}
        job.check(3)
    assert not stopped, "the device could be read"


def test_what_can_not_be_read_is_stopped(device: FakeBackend, root: Path, memory: Path) -> None:
    """A thread holds the driver's lock until its operator is aborted. Then on_clean comes before the state is read."""
    job = _train(device, root, memory)
    calls: list[object] = []

    def stop(fault: rekindle.Fault) -> None:
        calls.append(fault.cause)
        device.jam.set()

    with job.guarded(on_stop=stop, on_clean=calls.append, on_gasp=calls.append) as guard:
        for _ in range(3):
            job.step()
        job.step(threading.Event())
        device.jam.clear()
        job.fault(guard).join(_LONG)
        job.check(3)
    assert calls == ["signal", 3, 3]


def test_what_a_stopped_device_goes_on_with_does_not_count(device: FakeBackend, root: Path, memory: Path) -> None:
    """Aborted, a collective ends as if it had succeeded, and the update behind it begins: the state is torn."""
    job = _train(device, root, memory, snapshot_every=2)
    never = threading.Event()

    def stop(fault: rekindle.Fault) -> None:
        never.set()
        device.default.synchronize()
        device.jam.set()

    with job.guarded(on_stop=stop) as guard:
        for _ in range(3):
            job.step()
        job.ckpt._saver.conclude()
        device.default.synchronize()
        job.step(never)
        device.jam.clear()
        job.fault(guard).join(_LONG)
        job.check(2)
        assert max(job.in_memory()) == 2


@pytest.mark.parametrize("hangs", HANGS)
def test_a_device_that_stays_stuck_leaves_the_newest_snapshot(
    device: FakeBackend, root: Path, memory: Path, hangs: bool, caplog: pytest.LogCaptureFixture
) -> None:
    job = _train(device, root, memory, snapshot_every=2)
    over = threading.Event()
    stop = (lambda fault: over.wait()) if hangs else (lambda fault: None)
    with job.guarded(on_stop=stop, gasp_deadline=20.0) as guard:
        for _ in range(3):
            job.step()
        job.ckpt._saver.conclude()
        device.default.synchronize()
        device.jam.clear()
        thread = job.fault(guard)
        thread.join(_LONG)
        assert not thread.is_alive()
        job.check(2)
        assert max(job.in_memory()) == 2
        over.set()
    assert "does not answer, so the state on it can't be read" in caplog.text
    assert ("on_stop has not returned" in caplog.text) == hangs


@pytest.mark.parametrize("hangs", HANGS)
def test_communicators_of_nccl_are_aborted_unless_there_is_a_hook(
    device: FakeBackend, root: Path, memory: Path, hangs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    over, aborted = threading.Event(), threading.Event()

    def abort() -> None:
        aborted.set()
        if hangs:
            over.wait()
        device.jam.set()

    job = _train(device, root, memory, snapshot_every=2)
    monkeypatch.setattr(distributed_c10d, "_abort_process_group", abort)
    with job.guarded(gasp_deadline=20.0) as guard:
        for _ in range(3):
            job.step()
        job.ckpt._saver.conclude()
        device.default.synchronize()
        monkeypatch.setattr(dist, "is_initialized", lambda: True)
        monkeypatch.setattr(dist, "get_backend_config", lambda group=None: "cpu:gloo,cuda:nccl")
        device.jam.clear()
        job.fault(guard).join(_LONG)
        assert aborted.is_set()
        job.check(2 if hangs else 3)
        over.set()


def test_an_old_torch_that_can_abort_nothing_has_no_hook(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_backend_config", lambda group=None: "cuda:nccl")
    assert stop_hook([DEVICE]) is not None
    monkeypatch.delattr(distributed_c10d, "_abort_process_group")
    assert stop_hook([DEVICE]) is None


def test_npus_are_stopped_and_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[object] = []
    npu = SimpleNamespace(
        stop_device=lambda index: calls.append(("stop", index)),
        restart_device=lambda index: calls.append(("restart", index)),
    )
    monkeypatch.setitem(sys.modules, "torch_npu", SimpleNamespace(npu=npu))  # type: ignore[arg-type]
    hook = stop_hook([SimpleNamespace(type="npu", index=3)])  # type: ignore[list-item]
    assert hook is not None
    hook(rekindle.Fault("signal", 0, 1, 5, "rank 1 was killed"))
    assert calls == [("stop", 3), ("restart", 3)]
    assert stop_hook([]) is None and stop_hook([DEVICE]) is None


@pytest.mark.parametrize("hangs", [False, True])
def test_a_rehearsal_that_fails_holds_up_nothing(
    device: FakeBackend,
    root: Path,
    memory: Path,
    hangs: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    over = threading.Event()
    monkeypatch.setattr("concurrent.futures._base.TimeoutError", type("BeforePython311", (Exception,), {}))

    trains, really = threading.current_thread(), device.allocate

    def allocate(on: torch.device, nbytes: int) -> torch.Tensor:
        if threading.current_thread() is trains:
            return really(on, nbytes)
        if hangs:
            over.wait()
        raise RuntimeError("out of memory")

    monkeypatch.setattr(rescue, "_REHEARSAL", 0.05 if hangs else _LONG)
    monkeypatch.setattr(device, "allocate", allocate)
    job = _train(device, root, memory)
    with caplog.at_level(logging.WARNING), job.guarded():
        job.step()
        over.set()
    assert f"could not be read in a rehearsal{'' if hangs else ': out of memory'}. If a rank fails" in caplog.text


def test_a_state_on_the_host_costs_neither_threads_nor_streams(root: Path, memory: Path) -> None:
    ckpt = rekindle.Checkpointer(root, {"model": torch.nn.Linear(2, 2)})
    ckpt.restore()
    with ckpt.guard(watchdog=False, notices=()) as guard:
        assert not guard._rescue.devices
        assert not [thread for thread in threading.enumerate() if thread.name == "rekindle-probe"]
    ckpt.close()
