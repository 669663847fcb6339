"""Times steps. What is chosen, priced or shown by the length of steps takes it from here."""

from __future__ import annotations

import time
from collections.abc import Callable

__all__ = ["StepClock"]

_WARM_UP = 3
"""Steps that tell nothing of the others: compilation, first allocations, optimizer state that appears."""


class StepClock:
    """Looks at the clock once a step, as its ``step()`` begins to decide on a snapshot.

    So a step lasts from there to the next one's, and what its own snapshot takes is part of the step after it.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """``clock`` is that of the drain's notes."""
        self._clock = clock
        self.now = clock()
        """Time at which the newest step has ended."""
        self.count = 0
        """Steps of this start."""
        self.took: float | None = None
        """Length of the newest step in seconds; None of the first one, whose begin nobody has seen."""

    @property
    def is_warm(self) -> bool:
        """True if the newest step is like those to come."""
        return self.is_warm_at(self.count)

    @staticmethod
    def is_warm_at(number: int) -> bool:
        """Returns True if the step of that number, from 1, is like those to come."""
        return number > _WARM_UP + 1

    def tick(self) -> None:
        """A step has ended."""
        now = self._clock()
        self.took = now - self.now if self.count else None
        self.now = now
        self.count += 1
