"""When to try again what has failed: three times soon, then less and less often, until it works."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator

__all__ = ["SOON", "Backoff", "delays"]

SOON = 3
"""Tries after which something is done without. It is still tried now and then."""
_LONGEST = 60.0


def delays(within: float) -> Iterator[float]:
    """Seconds after each try, growing: the first three take ``within`` together; then up to a minute each."""
    yield from (within / 6, within / 3, within / 2)
    for doubled in itertools.count():
        yield min(within * 2 ** min(doubled, 16), max(within, _LONGEST))


class Backoff:
    """Those of one thing that works, or doesn't."""

    def __init__(self, within: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._within, self._clock = within, clock
        self.failed = 0
        """How many have, since one last didn't."""
        self._next = -math.inf
        self._pauses = delays(within)

    def due(self) -> bool:
        """Whether to try (again) now."""
        return self._clock() >= self._next

    def fail(self) -> None:
        self.failed += 1
        self._next = self._clock() + next(self._pauses)

    def succeed(self) -> None:
        self.failed, self._next, self._pauses = 0, -math.inf, delays(self._within)
