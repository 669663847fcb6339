"""Shows on the status page where training stands, and holds updates back once a fault has seized the state.

The thread that trains says what it does; after a fault another thread seizes the state while nothing changes it. Where
devices hold the state, they are behind that thread: it can no longer hold back what it has queued, and they decide.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from rekindle.memory.status import DONE, STABLE, STEPPING, UPDATING, StatusPage
from rekindle.save.progress import DeviceClock

__all__ = ["Gate", "NoGate"]

_RECENT = 20
"""Newest steps whose times the watchdog learns from."""
_POLL = 0.002
"""Seconds between two looks at devices that have not come to a step's end."""


class Gate:
    """Stands before each update of one rank. Thread-safe. A call takes the thread that trains about 6 microseconds."""

    def __init__(
        self,
        page: StatusPage,
        step: int,
        inject: Callable[[str], object] = lambda fault: None,
        before_update: Callable[[int], object] = lambda step: None,
        clock: DeviceClock | None = None,
    ) -> None:
        """``step``: completed updates; the state is that step's. ``inject`` brings about the fault that a drill orders.

        ``before_update`` is called with the step that an update is about to make. ``clock`` tells what devices hold;
        None if all of the state is on the host.
        """
        self._page, self._inject, self._before_update = page, inject, before_update
        self._clock = clock or DeviceClock()
        self._phase, self._step = STABLE, step
        """Progress of the thread that trains. After a fault the page shows what devices hold."""
        self._last_update = math.inf
        """Newest step whose update may begin."""
        self._lock = threading.RLock()  # entered itself: an interrupt can leave a condition that is entered locked
        self._changed = threading.Condition(self._lock)
        self._seized = self._dead = False
        self._met = False
        """True once ``before_update`` was called since the newest step."""
        self._recent: deque[float] = deque(maxlen=_RECENT)
        self._since: float | None = None
        """Time at which the current step began; None if its length is not to be learned from."""
        self.order = ""
        """The fault that a drill wants before the next update; empty for none."""
        self._show_host()

    def show_again(self) -> None:
        """Make the status page again, which somebody has removed. Raises OSError when that can't be done."""
        with self._lock:
            self._page.install()

    def _show(self) -> None:
        self._page.progress = time.monotonic_ns()
        self._page.write()

    def _show_host(self) -> None:
        self._page.step, self._page.phase = self._step, self._phase
        self._show()

    # -- for the thread that trains -----------------------------------------------------------------------------

    def updating(self, snapshot: int, *, together: bool = True) -> int | None:
        """Note that an update is about to begin. Waits while the state is seized.

        ``together``: all ranks make it, so the first one since a step calls ``before_update``. Returns the step that it
        makes, to the first of several optimizers; None to the others.
        """
        making = self._step + 1 if self._phase == STABLE else None
        if together and not self._met:
            self._before_update(self._step + 1)
            self._met = True
        if self.order:
            self._inject(self.order)
        self._enter(UPDATING, snapshot, making or 0)
        return making

    def stepping(self, snapshot: int) -> None:
        """Note that the update has ended, and its step is being saved. Waits while the state is seized."""
        self._enter(STEPPING, snapshot)

    def _enter(self, phase: int, snapshot: int, making: int = 0) -> None:
        with self._lock:
            while self._seized or making > self._last_update:
                self._changed.wait()  # whoever has seized the state ends the process
            self._phase, self._page.snapshot = phase, snapshot
            self._show_host()

    def stable(self, step: int, snapshot: int) -> None:
        """Note that the state is that of ``step`` until the next update; ``snapshot``: the newest step in memory."""
        with self._lock:
            page, now = self._page, time.monotonic()
            if self._since is not None and step > self._step:
                self._recent.append(now - self._since)
                page.longest, page.pause = max(self._recent), max(page.pause, self._recent[-1])
            self._since = now
            self._phase, self._step, page.snapshot, self._met = STABLE, step, snapshot, False
            self._show_host()
            self._changed.notify_all()

    @contextmanager
    def pause(self, what: str) -> Iterator[None]:
        """Let the watchdog wait meanwhile. The time counts for no step."""
        with self._lock:
            before, began = (self._page.note, self._page.paused), time.monotonic()
            self._page.note, self._page.paused = what.encode()[:64], True
            self._show()
        try:
            yield
        finally:
            with self._lock:
                self._page.note, self._page.paused = before
                if self._since is not None and not self._page.paused:
                    self._since += time.monotonic() - began
                self._show()

    def learn_nothing(self) -> None:
        """Leave the current step out of what the watchdog learns: another rank pauses, or a debugger holds it up."""
        with self._lock:
            self._since = None

    def end(self, *, well: bool) -> None:
        """Note that the thread that trains does no more. ``well``: True if the guarded part has ended as it should."""
        with self._lock:
            self._dead = True
            if well:
                self._phase = DONE
            self._show_host()
            self._changed.notify_all()

    # -- after a fault, for another thread ----------------------------------------------------------------------

    def freeze(self, *, late: bool) -> None:
        """Note what the devices have reached at the first call: at a fault's notice, before anything is stopped.

        With ``late`` what they reach from then on counts too, because all ranks live. A later call may withdraw that.
        """
        self._clock.freeze(late=late)

    def distrust(self) -> None:
        """Let nothing count that a device reaches from now on: what it does is about to be aborted."""
        self._clock.distrust()

    @property
    def on_devices(self) -> bool:
        """True if the state is on devices, which may be steps behind ``step``, the host's."""
        return self._clock.in_use

    def awaits(self, step: int) -> bool:
        """Returns True if devices may still come to the end of a step after ``step``, of which they have been told."""
        return self._clock.awaits(step)

    def seize(self, timeout: float, beyond: int = -1) -> int | None:
        """Wait until the state is that of a step after ``beyond``, and keep it so. Returns the step.

        Returns None after ``timeout`` seconds, or when it never will be, because the thread that trains has ended. What
        is queued on devices can't be held back: there the state stays only as long as ``DeviceClock.check`` agrees.
        Raises RekindleError when a device has failed.
        """
        if self._clock.in_use:
            return self._seize_devices(timeout, beyond)

        def ready() -> bool:
            return self._is_stable(beyond) or self._dead

        with self._lock:
            self._changed.wait_for(ready, timeout)
            if not self._is_stable(beyond):
                return None
            self._seized = True
            return self._step

    def _is_stable(self, beyond: int) -> bool:
        return self._phase == STABLE and self._step > beyond

    def _seize_devices(self, timeout: float, beyond: int) -> int | None:
        until = time.monotonic() + timeout
        with self._lock:
            self._last_update = beyond + 1  # the thread that trains ends the step that it is in, and begins no other
            while True:
                step = self._clock.standing()
                if step is not None and step > beyond:
                    self._seized = True
                    self._page.step, self._page.phase = step, STABLE
                    self._show()
                    return step
                never = self._clock.lost() or (self._dead and not self._clock.awaits(beyond))
                if never or time.monotonic() > until:
                    return None
                self._changed.wait(_POLL)

    def release(self) -> None:
        """Let training go on."""
        with self._lock:
            self._seized, self._last_update = False, math.inf
            self._changed.notify_all()

    def stage(self, stage: int, secured: int = -1) -> None:
        """Show how far the state is secured: the stage, and the newest step that is."""
        with self._lock:
            self._page.stage = stage
            self._page.secured = max(secured, self._page.secured)
            self._page.snapshot = max(secured, self._page.snapshot)
            self._show()

    @property
    def longest(self) -> float:
        """Seconds that the longest of the recent steps took; 0 while there were too few."""
        return self._page.longest

    @property
    def snapshot(self) -> int:
        """Newest step in memory; -1 if there is none."""
        return self._page.snapshot

    @property
    def phase(self) -> int:
        """Phase of training, as in ``rekindle.memory.status``."""
        return self._phase

    @property
    def step(self) -> int:
        """Newest step that the thread that trains has completed. Devices may be behind it."""
        return self._step


class NoGate:
    """Stands in for a Gate outside of ``guard()``: nobody watches, and nothing is held back."""

    def show_again(self) -> None:
        pass

    def updating(self, snapshot: int, *, together: bool = True) -> int | None:
        return None

    def stepping(self, snapshot: int) -> None:
        pass

    def stable(self, step: int, snapshot: int) -> None:
        pass

    def pause(self, what: str) -> AbstractContextManager[None]:
        return nullcontext()
