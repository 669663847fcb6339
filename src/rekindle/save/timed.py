"""Chooses the steps whose snapshots are a fixed time apart, the same ones on all ranks."""

from __future__ import annotations

import logging
import math
import statistics
from collections import deque
from collections.abc import Callable

from rekindle.save.step_clock import StepClock

__all__ = ["Timed"]

log = logging.getLogger("rekindle")

_RECENT = 8
"""Steps whose median foretells the next ones."""


class Timed:
    """Takes a snapshot every ``seconds``, at the step that ends nearest to that time. The first step has one.

    A rank alone looks at its clock. Several would see different times, some before the due one and some after it. So
    each tells in how many steps it expects the time to come, and the largest number counts. They ask each other at half
    of the steps that are left, and hear the answer a step later, when it has long been there: for an interval of a
    thousand steps that is ten times. The times themselves are multiples of ``seconds``, so errors do not add up.
    """

    def __init__(
        self,
        seconds: float,
        world: int,
        agree: Callable[[float], Callable[[], float]],
        clock: StepClock,
    ) -> None:
        """``agree`` as in ``rekindle.save.cadence``: takes this rank's number, later gives the largest of all."""
        self.every = 1
        """Steps between the newest two snapshots."""
        self.number = 0
        """Snapshots so far: on all ranks the same, as their steps are."""
        self._seconds, self._alone, self._agree, self._clock = seconds, world == 1, agree, clock
        self._steps: deque[float] = deque(maxlen=_RECENT)
        """Seconds of the newest steps."""
        self._taken = self._ask_at = 0
        """Steps up to the newest snapshot; before the next question."""
        self._answer: Callable[[], float] | None = None
        self._next = 0.0
        """Time at which the next snapshot is due."""
        self._apart = False
        """True once the ranks can't agree any more: all steps are due, so also those of the others."""

    def due(self, n: int) -> bool:
        """Returns True if step ``n`` is to have a snapshot. Called once a step, in order."""
        clock = self._clock
        if clock.took is not None:
            self._steps.append(clock.took)
        due = clock.count == 1 or self._apart or (self._is_nearest() if self._alone else self._is_told())
        if due:
            self._take()
        if not (self._alone or self._apart) and self._steps and clock.count >= self._ask_at:
            self._ask()
        return due

    def _is_nearest(self) -> bool:
        return self._clock.now + statistics.median(self._steps) / 2 >= self._next

    def _is_told(self) -> bool:
        """Takes up the answer to the question of the step before."""
        answer, self._answer = self._answer, None
        if answer is None:
            return False
        left = answer()
        self._apart = math.isnan(left)
        if self._apart:
            log.warning("every step has a snapshot from now on: the ranks can't agree on when one is due")
            return True
        self._ask_at = self._clock.count - 1 + int(left) // 2
        return left <= 1

    def _ask(self) -> None:
        expected = round((self._next - self._clock.now) / max(statistics.median(self._steps), 1e-9))
        self._answer = self._agree(float(max(1, expected)))

    def _take(self) -> None:
        now, count = self._clock.now, self._clock.count
        self.every, self._taken = max(1, count - self._taken), count
        self.number += 1
        self._next = now + self._seconds if count == 1 else self._next + self._seconds
        if self._next <= now:  # a long pause: what was missed is not made up for
            self._next = now + self._seconds
