"""Devices that can't be read after a fault are cleared as ``rekindle.devices.register`` was told."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import rekindle
from rekindle.devices import clearing
from rekindle.faults.built_in import stop_hook
from tests.devices.fake import DEVICE, FakeBackend
from tests.devices.faulty import Job

FAULT = rekindle.Fault("signal", 0, 1, 5, "rank 1 was killed")
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def nothing_registered(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(clearing, "_registered", {})
    yield


def test_a_device_is_stopped_cleaned_and_restored_before_it_is_read(
    device: FakeBackend, root: Path, memory: Path
) -> None:
    calls: list[tuple[str, torch.device]] = []
    rekindle.devices.register(
        DEVICE.type,
        stop=lambda one: calls.append(("stop", one)),
        clean=lambda one: calls.append(("clean", one)),
        restore=lambda one: (calls.append(("restore", one)), device.jam.set()),
    )
    job = Job(device, root, memory)
    with job.guarded() as guard:
        for _ in range(3):
            job.step()
        job.step(threading.Event())
        device.jam.clear()
        job.fault(guard).join(60)
        job.check(3)
    assert calls == [("stop", DEVICE), ("clean", DEVICE), ("restore", DEVICE)]


def test_memory_that_is_lost_is_not_restored(
    device: FakeBackend, root: Path, memory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    restored: list[torch.device] = []
    rekindle.devices.register(DEVICE.type, clean=lambda one: False, restore=restored.append)
    job = Job(device, root, memory, snapshot_every=2)
    with job.guarded(gasp_deadline=20.0) as guard:
        for _ in range(3):
            job.step()
        job.ckpt._saver.conclude()
        device.default.synchronize()
        device.jam.clear()
        with caplog.at_level(logging.ERROR):
            job.fault(guard).join(60)
        job.check(2)
        device.jam.set()
    assert not restored and "is lost, as its clean says" in caplog.text


def test_all_devices_are_stopped_before_one_is_restored() -> None:
    calls: list[str] = []
    rekindle.devices.register("cuda", stop=lambda one: calls.append(f"stop {one.index}"))
    rekindle.devices.register("xpu", restore=lambda one: calls.append(f"restore {one.index}"))
    hook = stop_hook([torch.device("xpu", 2), torch.device("cuda", 1)])
    assert hook is not None
    hook(FAULT)
    assert calls == ["stop 1", "restore 2"]


def test_nothing_is_known_of_the_host_until_it_is_told() -> None:
    stopped: list[torch.device] = []
    assert stop_hook([]) is None and stop_hook([torch.device("xpu")]) is None
    rekindle.devices.register("cpu", stop=stopped.append)
    hook = stop_hook([])
    assert hook is not None
    hook(FAULT)
    assert stopped == [CPU]
    rekindle.devices.register("cpu")
    assert stop_hook([]) is None


@pytest.mark.parametrize("name", ["no such device", "cuda:0", ""])
def test_a_type_that_torch_does_not_know_is_refused(name: str) -> None:
    with pytest.raises(rekindle.UsageError):
        rekindle.devices.register(name, stop=print)


def test_what_can_not_be_called_is_refused() -> None:
    with pytest.raises(rekindle.UsageError, match="clean"):
        rekindle.devices.register("cuda", clean=3)  # type: ignore[arg-type]
