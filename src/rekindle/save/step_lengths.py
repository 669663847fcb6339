"""Measures the lengths of steps where they are made: on the devices that hold the state, else on the host.

The host may be many steps ahead of a device. Then its steps are as long as it takes to queue them, and it doesn't see
that the device waits for a copy.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from contextlib import suppress
from typing import NamedTuple

import torch

from rekindle.devices.timing import Point, mark, seconds_between
from rekindle.save.step_clock import StepClock

__all__ = ["Load", "Step", "StepLengths"]

_MOST = 256
"""Steps by which a device may be behind, and no more: the lengths of older ones are not waited for."""


class Load(NamedTuple):
    """The snapshot that a step had to carry."""

    least: float
    """Seconds for which it was seen to hold training up."""
    most: float
    """Seconds from its begin to its commit: it can't have cost more."""
    nbytes: int


class Step(NamedTuple):
    """A step whose length is known."""

    number: int
    """Number among the steps of this start, from 1."""
    seconds: float
    load: Load | None
    """The snapshot of the step before, which was completed in this one; None if there was none."""

    @property
    def is_warm(self) -> bool:
        """True if it is like those to come."""
        return StepClock.is_warm_at(self.number)


class StepLengths:
    """Notes the end of each step, and gives the lengths of steps once they are known. For the thread that trains."""

    def __init__(self, clock: StepClock, devices: Collection[torch.device] = ()) -> None:
        """``clock`` ticks before each call of ``stepped``. ``devices``: those of the state that work off queues."""
        self._clock = clock
        self._devices = sorted(devices, key=str)
        self._open: deque[tuple[int, Load | None, list[Point]]] = deque()
        """Steps whose ends devices have not reached yet."""
        self._end: list[Point] = []
        """End of the newest step that devices have reached."""

    def stepped(self, load: Load | None) -> list[Step]:
        """Note the end of a step, which had ``load`` to carry. Returns the steps whose lengths are known since."""
        if self._devices:
            with suppress(RuntimeError):  # a device that has failed, or that can't tell times
                return self._reached(load)
            self._devices = []
        clock = self._clock
        return [Step(clock.count, clock.took, load)] if clock.took is not None else []

    def _reached(self, load: Load | None) -> list[Step]:
        self._open.append((self._clock.count, load, [mark(device) for device in self._devices]))
        if len(self._open) > _MOST:
            self._end = self._open.popleft()[2]
        steps = []
        while self._open and all(point.reached() for point in self._open[0][2]):
            number, carried, end = self._open.popleft()
            if self._end:
                seconds = max(seconds_between(*pair) for pair in zip(self._end, end, strict=True))
                # What holds the host up holds no device up that has work to do.
                steps.append(Step(number, seconds, carried and carried._replace(least=0.0)))
            self._end = end
        return steps
