"""Waits for points in devices' queues: one thread for each device looks, and every wait has a bound."""

from __future__ import annotations

import os
import threading
import time
from contextlib import suppress

import torch

from rekindle.devices.backend import Backend, QueueEvent
from rekindle.devices.table import backend_of

__all__ = ["Event", "keep_events", "record"]

_FIRST, _LONGEST = 1e-4, 2e-3
"""Seconds between two looks at a device: at first, doubled each time, and at most.

A look holds the interpreter's lock: many threads that look often slow the launching of kernels.
"""


class Event:
    """Point in a device's queue, which the device reaches after all that was queued before. Thread-safe."""

    def __init__(self, device: torch.device, raw: QueueEvent) -> None:
        self.device, self.raw = device, raw
        self._reached = False
        """True once the device was seen to be past it: a device that fails later answers no questions any more."""

    def __del__(self) -> None:
        if _kept is not None:
            _kept.append(self.raw)

    def reached(self) -> bool:
        """Returns True if the device has reached it. For threads that have entered the device.

        Raises RuntimeError when the device has failed before it was seen to be past this.
        """
        if not self._reached:
            self._reached = bool(self.raw.query())
        return self._reached

    def wait(self, timeout: float) -> bool:
        """Returns True once the device has reached it, False after ``timeout`` seconds. Raises as ``reached`` does."""
        return self._reached or _watch(self.device).wait(self, timeout)


_kept: list[QueueEvent] | None = None
"""Events that nobody asks any more, after a fault; None before."""


def keep_events() -> None:
    """Frees no events from now on, after a fault: with CUDA that may wait for a device that is stuck."""
    global _kept
    _kept = [] if _kept is None else _kept


def record(device: torch.device) -> Event:
    """Records an event on the calling thread's stream. The device must have a backend."""
    backend = backend_of(device)
    assert backend is not None
    return Event(device, backend.current_stream(device).record_event())


class _Look:
    """One event that somebody waits for."""

    def __init__(self, event: Event) -> None:
        self.event = event
        self.over = threading.Event()
        self.error: RuntimeError | None = None

    def done(self) -> bool:
        """True once there is nothing left to look for."""
        try:
            if not self.event.reached():
                return False
        except RuntimeError as error:
            self.error = error
        self.over.set()
        return True


class _Watch:
    """Thread that looks at the events of one device for all who wait."""

    def __init__(self, backend: Backend, device: torch.device) -> None:
        self._backend, self._device = backend, device
        self._looks: list[_Look] = []
        self._changed = threading.Condition()
        self._again = False
        threading.Thread(target=self._run, name="rekindle-device", daemon=True).start()

    def wait(self, event: Event, timeout: float) -> bool:
        """Returns as ``Event.wait`` does."""
        look = _Look(event)
        with self._changed:
            self._looks.append(look)
            self._again = True
            self._changed.notify()
        look.over.wait(timeout)
        with self._changed:
            if look in self._looks:
                self._looks.remove(look)
        if look.error is not None:
            raise look.error
        return look.over.is_set()

    def _run(self) -> None:
        with suppress(RuntimeError):  # a device that has failed: each look says so
            self._backend.enter(self._device)
        pause = _FIRST
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._looks)
                if self._again:
                    self._again, pause = False, _FIRST
                looks = list(self._looks)
            over = [look for look in looks if look.done()]
            with self._changed:
                self._looks = [look for look in self._looks if look not in over]
            if over:
                pause = _FIRST
            else:
                time.sleep(pause)
                pause = min(2 * pause, _LONGEST)


_watches: dict[tuple[int, torch.device], _Watch] = {}
_making = threading.Lock()


def _watch(device: torch.device) -> _Watch:
    key = os.getpid(), device  # threads don't come along into a forked child
    with _making:
        if key not in _watches:
            backend = backend_of(device)
            assert backend is not None
            _watches[key] = _Watch(backend, device)
        return _watches[key]
