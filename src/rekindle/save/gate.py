"""Shows on the status page where training stands, and holds updates back once a fault has seized the state.

The thread that trains says what it does; after a fault another thread seizes the state while nothing changes it.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from rekindle.memory.status import DONE, STABLE, STEPPING, UPDATING, StatusPage

__all__ = ["Gate", "NoGate"]

_RECENT = 20
"""Newest steps whose times the watchdog learns from."""


class Gate:
    """Stands before each update of one rank. Thread-safe. A call takes the thread that trains about 6 microseconds."""

    def __init__(
        self,
        page: StatusPage,
        step: int,
        inject: Callable[[str], object] = lambda fault: None,
        before_update: Callable[[int], object] = lambda step: None,
    ) -> None:
        """``step``: completed updates; the state is that step's. ``inject`` brings about the fault that a drill orders.

        ``before_update`` is called with the step that an update is about to make.
        """
        self._page, self._inject, self._before_update = page, inject, before_update
        self._changed = threading.Condition()
        self._seized = self._dead = False
        self._recent: deque[float] = deque(maxlen=_RECENT)
        self._since: float | None = None
        """Time at which the current step began; None if its length is not to be learned from."""
        self.order = ""
        """The fault that a drill wants before the next update; empty for none."""
        page.step, page.phase = step, STABLE
        self._show()

    def show_again(self) -> None:
        """Make the status page again, which somebody has removed. Raises OSError when that can't be done."""
        with self._changed:
            self._page.install()

    def _show(self) -> None:
        self._page.progress = time.monotonic_ns()
        self._page.write()

    # -- for the thread that trains -----------------------------------------------------------------------------

    def updating(self, snapshot: int) -> None:
        """Note that an update is about to begin. Waits while the state is seized."""
        if self._page.phase == STABLE:  # the first optimizer of several
            self._before_update(self._page.step + 1)
        if self.order:
            self._inject(self.order)
        self._enter(UPDATING, snapshot)

    def stepping(self, snapshot: int) -> None:
        """Note that the update has ended, and its step is being saved. Waits while the state is seized."""
        self._enter(STEPPING, snapshot)

    def _enter(self, phase: int, snapshot: int) -> None:
        with self._changed:
            while self._seized:
                self._changed.wait()  # whoever has seized the state ends the process
            self._page.phase, self._page.snapshot = phase, snapshot
            self._show()

    def stable(self, step: int, snapshot: int) -> None:
        """Note that the state is that of ``step`` until the next update; ``snapshot``: the newest step in memory."""
        with self._changed:
            page, now = self._page, time.monotonic()
            if self._since is not None and step > page.step:
                self._recent.append(now - self._since)
                page.longest, page.pause = max(self._recent), max(page.pause, self._recent[-1])
            self._since = now
            page.phase, page.step, page.snapshot = STABLE, step, snapshot
            self._show()
            self._changed.notify_all()

    @contextmanager
    def pause(self, what: str) -> Iterator[None]:
        """Let the watchdog wait meanwhile. The time counts for no step."""
        with self._changed:
            before, began = (self._page.note, self._page.paused), time.monotonic()
            self._page.note, self._page.paused = what.encode()[:64], True
            self._show()
        try:
            yield
        finally:
            with self._changed:
                self._page.note, self._page.paused = before
                if self._since is not None and not self._page.paused:
                    self._since += time.monotonic() - began
                self._show()

    def learn_nothing(self) -> None:
        """Leave the current step out of what the watchdog learns: another rank pauses, or a debugger holds it up."""
        with self._changed:
            self._since = None

    def end(self, *, well: bool) -> None:
        """Note that the thread that trains does no more. ``well``: True if the guarded part has ended as it should."""
        with self._changed:
            self._dead = True
            if well:
                self._page.phase = DONE
            self._show()
            self._changed.notify_all()

    # -- after a fault, for another thread ----------------------------------------------------------------------

    def seize(self, timeout: float, beyond: int = -1) -> int | None:
        """Wait until the state is that of a step after ``beyond``, and keep it so. Returns the step.

        Returns None after ``timeout`` seconds, or when it never will be, because the thread that trains has ended.
        """

        def ready() -> bool:
            return self._is_stable(beyond) or self._dead

        with self._changed:
            self._changed.wait_for(ready, timeout)
            if not self._is_stable(beyond):
                return None
            self._seized = True
            return self._page.step

    def _is_stable(self, beyond: int) -> bool:
        return self._page.phase == STABLE and self._page.step > beyond

    def release(self) -> None:
        """Let training go on."""
        with self._changed:
            self._seized = False
            self._changed.notify_all()

    def stage(self, stage: int, secured: int = -1) -> None:
        """Show how far the state is secured: the stage, and the newest step that is."""
        with self._changed:
            self._page.stage = stage
            self._page.secured = max(secured, self._page.secured)
            self._page.snapshot = max(secured, self._page.snapshot)
            self._show()

    @property
    def snapshot(self) -> int:
        """Newest step in memory; -1 if there is none."""
        return self._page.snapshot

    @property
    def phase(self) -> int:
        """Phase of training, as in ``rekindle.memory.status``."""
        return self._page.phase

    @property
    def step(self) -> int:
        """Newest completed step."""
        return self._page.step


class NoGate:
    """Stands in for a Gate outside of ``guard()``: nobody watches, and nothing is held back."""

    def show_again(self) -> None:
        pass

    def updating(self, snapshot: int) -> None:
        pass

    def stepping(self, snapshot: int) -> None:
        pass

    def stable(self, step: int, snapshot: int) -> None:
        pass

    def pause(self, what: str) -> AbstractContextManager[None]:
        return nullcontext()
