"""Waits for points in devices' queues: one thread for each device looks, and every wait has a bound."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

import torch

from rekindle.common.flag import Flag
from rekindle.common.workers import ending
from rekindle.devices.backend import QueueEvent
from rekindle.devices.table import PerDevice, require_backend
from rekindle.errors import RekindleError

__all__ = ["STUCK", "Event", "await_device", "keep_events", "record", "wait_for_copy"]

T = TypeVar("T")

_FIRST, _LONGEST = 1e-4, 2e-3
"""Seconds between two looks at a device: at first, doubled each time, and at most.

A look holds the interpreter's lock: many threads that look often slow the launching of kernels.
"""
STUCK = 600.0
"""Seconds after which a copy that doesn't end counts as failed."""
_CHECK = 1.0
"""Seconds after which a thread that waits for a device looks whether the process is ending."""
_GRACE = 5.0
"""Seconds that devices get at the process's end: most end a copy in far less, and one that is stuck never does."""
_grace_until = math.inf
"""End of that time, once a wait has seen the process end: one for all waits, as each that fails may lead to another."""


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
        return self._reached or _watches.of(self.device).wait(self, timeout)


_kept: list[QueueEvent] | None = None
"""Events that nobody asks any more, after a fault; None before."""


def keep_events() -> None:
    """Frees no events from now on, after a fault: with CUDA that may wait for a device that is stuck."""
    global _kept
    _kept = [] if _kept is None else _kept


def record(device: torch.device) -> Event:
    """Records an event on the calling thread's stream. The device must have a backend."""
    return Event(device, require_backend(device).current_stream(device).record_event())


def wait_for_copy(event: Event) -> None:
    """Returns once a device has copied. Raises RekindleError if it doesn't, or not before the process has to end."""
    await_device(lambda seconds: event.wait(seconds) or None, "a device has not copied its part")


def await_device(look: Callable[[float], T | None], failure: str) -> T:
    """Returns what ``look`` finds, which waits for at most as many seconds as it is given, and else returns None.

    Raises RekindleError of ``failure`` when a device that is stuck, or the process's end, lets it find nothing.
    """
    global _grace_until
    until = time.monotonic() + STUCK
    while (found := look(_CHECK)) is None:
        now = time.monotonic()
        if ending():
            _grace_until = min(_grace_until, now + _GRACE)
        if now > min(until, _grace_until):
            raise RekindleError(f"{failure} within {STUCK:.0f} s, or by the process's end")
    return found


class _Look:
    """One event that somebody waits for."""

    def __init__(self, event: Event) -> None:
        self.event = event
        self.over = Flag()
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

    def __init__(self, device: torch.device) -> None:
        self._backend, self._device = require_backend(device), device
        self._looks: list[_Look] = []
        self._lock = threading.RLock()  # entered itself: an interrupt can leave a condition that is entered locked
        self._changed = threading.Condition(self._lock)
        self._again = False
        threading.Thread(target=self._run, name="rekindle-device", daemon=True).start()

    def wait(self, event: Event, timeout: float) -> bool:
        """Returns as ``Event.wait`` does."""
        look = _Look(event)
        with self._lock:
            self._looks.append(look)
            self._again = True
            self._changed.notify()
        look.over.wait(timeout)
        with self._lock:
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
            with self._lock:
                self._changed.wait_for(lambda: self._looks)
                if self._again:
                    self._again, pause = False, _FIRST
                looks = list(self._looks)
            over = [look for look in looks if look.done()]
            with self._lock:
                self._looks = [look for look in self._looks if look not in over]
            if over:
                pause = _FIRST
            else:
                time.sleep(pause)
                pause = min(2 * pause, _LONGEST)


_watches = PerDevice(_Watch)  # threads don't come along into a forked child
