"""Decides when to retry what has failed: three times soon, then less and less often, until it works."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator

__all__ = ["EARLY_TRIES", "Backoff", "delays"]

EARLY_TRIES = 3
"""Failures after which the caller goes on without what has failed. It is still retried now and then."""
_LONGEST = 60.0
"""Most seconds between two tries, unless the first three take longer together."""


def delays(within: float) -> Iterator[float]:
    """Yields the seconds to wait after each failure: the first three sum up to ``within``, then up to a minute each."""
    yield from (within / 6, within / 3, within / 2)
    for doubled in itertools.count():
        yield min(within * 2 ** min(doubled, 16), max(within, _LONGEST))


class Backoff:
    """Counts the failures of one operation and decides when it is due again. Not thread-safe."""

    def __init__(self, within: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._within, self._clock = within, clock
        self.failed = 0
        """Number of failures since the last success."""
        self._next = -math.inf
        self._pauses = delays(within)

    def due(self) -> bool:
        """True if it is time for the next try."""
        return self._clock() >= self._next

    def fail(self) -> None:
        """Counts a failure and waits longer before the next try."""
        self.failed += 1
        self._next = self._clock() + next(self._pauses)

    def succeed(self) -> None:
        """Forgets all failures."""
        self.failed, self._next, self._pauses = 0, -math.inf, delays(self._within)
