"""Measures what snapshots and drains take from training, and notes it for the agent and for people."""

from __future__ import annotations

import itertools
import statistics
from collections import deque
from collections.abc import Iterable
from contextlib import suppress

from rekindle.memory.job_dir import JobDir
from rekindle.memory.prices import Prices, write_prices
from rekindle.save.step_clock import StepClock
from rekindle.save.step_lengths import Step

__all__ = ["Pricing"]

_LOOK_EVERY = 5.0
"""Seconds between looks for a drain that has ended. A look reads and writes a small file in memory."""
_ENOUGH = 256
"""Steps whose median is taken for that of more: a thousand would take half a millisecond."""
_FEWEST = 3
"""Steps of a kind, of which fewer tell nothing."""


class Pricing:
    """Compares steps beside a snapshot or a drain with others. For one rank of each node: all wait for the slowest."""

    def __init__(self, job: JobDir, start: str, clock: StepClock) -> None:
        """``start`` is the incarnation that trains."""
        self._job, self._start, self._clock = job, start, clock
        self._bare: deque[float] = deque(maxlen=64)
        self._loaded: deque[float] = deque(maxlen=64)
        """Seconds of steps without a snapshot to hide, and of those with one."""
        self._stalls: deque[float] = deque(maxlen=64)
        self._snapshots: deque[float] = deque(maxlen=64)
        """Times of the newest snapshots."""
        self._newest: deque[tuple[float, float]] = deque(maxlen=4096)
        """End and length of the newest steps, to be found beside a drain that has ended."""
        self._drains: deque[tuple[float, float, float]] = deque(maxlen=16)
        """Begin, length and price of the newest drains."""
        self._seen: tuple[float, float] | None = None
        """The newest drain that was looked at."""
        self._look_at = clock.now + _LOOK_EVERY

    def stepped(self, steps: Iterable[Step]) -> None:
        """Notes that a step has ended. ``steps``: those whose lengths are known since the last call."""
        now, took = self._clock.now, self._clock.took
        if took is not None and self._clock.is_warm:
            self._newest.append((now, took))
        for step in steps:
            if step.is_warm and step.load is None:
                self._bare.append(step.seconds)
            elif step.is_warm and step.load is not None:
                self._loaded.append(step.seconds)
                self._stalls.append(step.load.least)
                self._snapshots.append(now)
        if now >= self._look_at:
            self._look_at = now + _LOOK_EVERY
            self._look()

    def _look(self) -> None:
        drain = self._job.notes.last_drain()
        if drain is not None and drain != self._seen:
            self._seen = drain
            price = self._price_of(*drain)
            if price is not None:
                self._drains.append((*drain, price))
        prices = self.prices()
        if prices is not None:
            with suppress(OSError):
                write_prices(self._job, self._start, prices)

    def _price_of(self, began: float, seconds: float) -> float | None:
        """Returns the seconds by which a drain has made steps longer; None if too few are known to tell."""
        beside: list[float] = []
        others: list[float] = []
        for end, took in self._newest:
            (beside if began < end < began + seconds + took else others).append(took)
        if not beside or len(others) < _FEWEST:
            return None
        return len(beside) * max(0.0, statistics.median(beside[-_ENOUGH:]) - statistics.median(others[-_ENOUGH:]))

    def prices(self) -> Prices | None:
        """Returns what is known by now; None while that is too little."""
        if max(len(self._bare), len(self._loaded)) < _FEWEST:
            return None
        compared = len(self._bare) >= _FEWEST and len(self._loaded) > 0  # of snapshots there may be few
        step = statistics.median(self._bare if compared or not self._loaded else self._loaded)
        stall = statistics.median(self._stalls) if self._stalls else 0.0
        more = statistics.median(self._loaded) - step if compared else 0.0
        begins, lengths, prices = zip(*self._drains, strict=True) if self._drains else ((), (), ())
        return Prices(
            step=step,
            snapshot=max(stall, more),
            snapshot_gap=_mean_gap(self._snapshots),
            drain=statistics.median(lengths) if lengths else None,
            drain_cost=statistics.median(prices) if prices else None,
            drain_gap=_mean_gap(begins),
        )


def _mean_gap(times: Iterable[float]) -> float | None:
    gaps = [later - at for at, later in itertools.pairwise(times)]
    return statistics.fmean(gaps) if gaps else None
