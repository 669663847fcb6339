"""Has devices copy into page-locked memory beside training: a few batches ahead, spread over the time there is."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

import torch

from rekindle.common.flag import Flag
from rekindle.devices.batches import AHEAD
from rekindle.devices.events import Event
from rekindle.save.plan import Batch, require_in_place
from rekindle.save.witness import Look

__all__ = ["DeviceCopies"]

_SHARE = 0.8
"""Share of the time until the next update over which copies are spread: the rest is for a step that takes less."""


class DeviceCopies:
    """Queues copies of batches on side streams, in order. For any threads, at the same time.

    ``copy`` queues one batch. ``window`` is the time in seconds until the update that has to wait for them; 0 if that
    is not known.
    """

    def __init__(
        self, batches: Sequence[Batch], copy: Callable[[Batch], Event], window: float, look: Callable[[], Look] | None
    ) -> None:
        """``look`` queues a look behind the last copy."""
        self._batches, self._copy, self._window, self._look = batches, copy, window, look
        self.after: Look | None = None
        """That look, once all copies are queued."""
        self._numbers = {batch.start: number for number, batch in enumerate(batches)}
        self._began = time.monotonic()
        self._events: list[Event] = []
        """Ends of the copies queued so far."""
        self._queueing = threading.Lock()
        self._hurry = Flag()

    def queue_all(self) -> None:
        """Queues all that is left, at once. Waits for no copy."""
        self._hurry.set()
        self._queue(len(self._batches))

    def _queue(self, count: int) -> None:
        """Queues the first ``count`` batches, except those that are queued already."""
        while len(self._events) < count:
            with self._queueing:
                number = len(self._events)
                if number < count:
                    require_in_place(self._batches[number].units)
                    event = self._copy(self._batches[number])
                    if number == len(self._batches) - 1 and self._look is not None:
                        self.after = self._look()
                    self._events.append(event)

    def queue_ahead(self, number: int = 0) -> None:
        """Queues batch ``number`` and those that may be queued while it is copied, each when it is due."""
        for one in range(len(self._events), min(number + AHEAD, len(self._batches))):
            due = self._began + _SHARE * self._window * one / len(self._batches)
            if one > number:
                if due > time.monotonic():
                    return
            else:
                self._hurry.wait(max(0.0, due - time.monotonic()))
            self._queue(one + 1)

    def await_queued(self, batch: Batch) -> Event:
        """Returns the end of the copy of ``batch``. Queues it when it is due, and some of those behind it."""
        number = self._numbers[batch.start]
        self.queue_ahead(number)
        return self._events[number]

    def last(self) -> list[Event]:
        """Returns the end of the last copy on each device."""
        found: dict[torch.device, Event] = {event.device: event for event in self._events}
        return list(found.values())
