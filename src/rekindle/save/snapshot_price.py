"""Computes what a snapshot takes from training, by comparing steps that carry one with steps that don't."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterable

from rekindle.save.step_lengths import Load, Step

__all__ = ["SnapshotPrice"]

_RECENT = 200
"""Steps whose lengths count: so a change is followed within as many."""
_FEWEST_LOADED, _FEWEST_BARE = 3, 8
"""Newest samples that count though they are older."""
_MOST = 32
"""Samples of each kind that count at most."""
_SAME_SIZE = 0.05
"""Share by which the sizes of snapshots may differ whose prices are comparable."""

_Samples = deque[tuple[int, float]]
"""Numbers of steps, and seconds."""


class SnapshotPrice:
    """Price of a snapshot on one rank: seconds by which the step that carries it is longer than others.

    At least those for which training was seen to stand still, and at most those from the snapshot's begin to its
    commit: a step may be long for other reasons. The latter is the price while nothing can be compared yet.
    """

    def __init__(self) -> None:
        self._bare: _Samples = deque(maxlen=_MOST)
        self._prices: _Samples = deque(maxlen=_MOST)
        self._first_bare: float | None = None
        self._first_price: float | None = None
        """Shortest of the first steps, which tell little of the others, and the dearest snapshot among them."""
        self._newest = 0
        self._nbytes = 0

    def add(self, step: Step) -> None:
        """Take account of one more step."""
        self._newest = step.number
        if step.load is not None:
            self._add_loaded(step, step.load)
        elif step.is_warm:
            self._bare.append((step.number, step.seconds))
        else:
            self._first_bare = min(step.seconds, self._first_bare or step.seconds)

    def _add_loaded(self, step: Step, load: Load) -> None:
        if abs(load.nbytes - self._nbytes) > _SAME_SIZE * self._nbytes:
            self._nbytes, self._first_price = load.nbytes, None
            self._prices.clear()
        most = max(load.least, load.most)
        if step.is_warm and self._bare:
            longer = step.seconds - self._median(self._bare, _FEWEST_BARE)
            self._prices.append((step.number, min(max(longer, load.least), most)))
        else:
            self._first_price = max(most, self._first_price or 0.0)

    def known(self) -> tuple[float, float] | None:
        """Returns the price of a snapshot and the length of a step without one, in seconds; None if not known yet."""
        price = self._median(self._prices, _FEWEST_LOADED) if self._prices else self._first_price
        bare = self._median(self._bare, _FEWEST_BARE) if self._bare else self._first_bare
        return None if price is None or bare is None else (max(price, 0.0), max(bare, 1e-9))

    def _median(self, samples: Iterable[tuple[int, float]], fewest: int) -> float:
        every = list(samples)
        recent = [seconds for number, seconds in every if number > self._newest - _RECENT]
        return statistics.median(recent if len(recent) >= fewest else [seconds for _, seconds in every[-fewest:]])
