"""Waiting for points in a device's queue: one thread looks, ever less often, for all who wait."""

from __future__ import annotations

import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from rekindle.devices.events import _LONGEST, record
from tests.devices.fake import DEVICE, FakeBackend, FakeEvent

SOON = 20.0


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the threads that have looked at an event."""
    found: list[str] = []
    query = FakeEvent.query

    def note(event: FakeEvent) -> bool:
        found.append(threading.current_thread().name)
        return query(event)

    monkeypatch.setattr(FakeEvent, "query", note)
    return found


def test_a_long_wait_looks_seldom_and_in_one_thread(device: FakeBackend, looks: list[str]) -> None:
    release = device.stick()
    event = record(DEVICE)
    began = time.monotonic()
    with ThreadPoolExecutor(8) as pool:
        waits = [pool.submit(event.wait, SOON) for _ in range(8)]
        while time.monotonic() - began < 0.5:
            assert not event.wait(0.1)
        release.set()
        assert all(wait.result() for wait in waits)
    took = time.monotonic() - began
    assert set(looks) == {"rekindle-device"}
    waiters, restarts = 9, 8 + took / 0.1
    assert len(looks) <= waiters * (took / _LONGEST + 6 * (restarts + 1)), "each look holds the interpreter's lock"


def test_an_event_that_was_reached_stays_so(device: FakeBackend) -> None:
    event = record(DEVICE)
    assert event.wait(SOON)
    device.lost = "assertion"
    assert event.wait(0) and event.reached()


def test_a_wait_ends_in_time(device: FakeBackend) -> None:
    release = device.stick()
    event = record(DEVICE)
    assert not event.wait(0.05)
    release.set()
    assert event.wait(SOON)


def test_who_waits_is_told_of_a_device_that_fails(device: FakeBackend) -> None:
    release = device.stick()
    event = record(DEVICE)
    with ThreadPoolExecutor(3) as pool:
        waits = [pool.submit(event.wait, SOON) for _ in range(3)]
        device.lost = "assertion"
        for wait in waits:
            with pytest.raises(RuntimeError, match="assertion"):
                wait.result()
    release.set()


def test_a_device_that_failed_before_the_first_wait(device: FakeBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    release = device.stick()
    event = record(DEVICE)

    def fail(of: Any) -> None:
        device._local.entered = True
        raise RuntimeError("device is lost")

    monkeypatch.setattr(device, "enter", fail)
    device.lost = "assertion"
    began = time.monotonic()
    with pytest.raises(RuntimeError, match="assertion"):
        event.wait(10 * SOON)
    assert time.monotonic() - began < SOON
    release.set()


def test_a_forked_child_has_a_thread_of_its_own(device: FakeBackend) -> None:
    first = record(DEVICE)
    assert first.wait(SOON)
    second = record(DEVICE)
    device.settle()
    child = os.fork()
    if child == 0:
        os._exit(0 if second.wait(SOON) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
