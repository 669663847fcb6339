"""Chooses the interval between snapshots: a fixed number of steps, or the smallest that a budget allows."""

from __future__ import annotations

import logging
import math
import statistics
import time
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from typing import Literal

import torch
import torch.distributed as dist

__all__ = ["Auto", "Cadence", "Fixed", "agreement", "cadence_of"]

log = logging.getLogger("rekindle")

_WARM_UP = 3
"""Steps that are not measured: compilation, first allocations, optimizer state that appears."""
_FIRST_LOOK = 24
"""Steps after which the first interval is chosen. Until then every other step has a snapshot."""
_LOOK_EVERY = 100
_LISTEN_AFTER = 3
"""Steps between asking the other ranks and acting on what they say, so that nobody waits for the answer."""
_PROBE = 32
"""With a snapshot at every step, each so many-th is left out to see what a step takes without one."""
_FEWEST = 3
"""Samples of each kind without which nothing is changed."""
_STICKY = 0.75
"""A longer interval is kept until a shorter one, of at most this share of it, would do."""
_AGREE_WITHIN = timedelta(seconds=30)

Agreement = Callable[[float], Callable[[], float]]
"""Takes this rank's number, and returns a callable that later gives the largest of all ranks' numbers."""


class Fixed:
    """Takes a snapshot every ``every`` steps."""

    def __init__(self, every: int) -> None:
        self.every = every

    def due(self, n: int, stall: float | None) -> bool:
        """Returns True if step ``n`` is to have a snapshot. Called once a step, in order.

        ``stall``: seconds for which the snapshot of the step before held training up; None if it had none.
        """
        return n % self.every == 0


class Auto:
    """Finds the smallest interval at which snapshots slow training by at most ``budget`` (0.01 is 1 %).

    The cost of a snapshot is the median time of a step that has one to hide behind it, less that of a step that has
    not, and at least the time for which training was seen to stand still. All ranks choose alike, because ``agree``
    tells each the largest cost of all.
    """

    def __init__(self, budget: float, agree: Agreement, clock: Callable[[], float] = time.perf_counter) -> None:
        self.every = 1
        self._budget, self._agree, self._clock = budget, agree, clock
        self._with: deque[float] = deque(maxlen=16)
        self._without: deque[float] = deque(maxlen=64)
        self._stalls: deque[float] = deque(maxlen=16)
        self._steps = 0
        self._began: float | None = None
        self._answer: Callable[[], float] | None = None
        self._answer_at = 0

    def due(self, n: int, stall: float | None) -> bool:
        self._measure(stall)
        self._steps += 1
        if self._steps == _FIRST_LOOK or self._steps % _LOOK_EVERY == 0:
            self._answer, self._answer_at = self._agree(self._share()), self._steps + _LISTEN_AFTER
        if self._answer is not None and self._steps >= self._answer_at:
            self._decide(self._answer())
            self._answer = None
        if self._steps <= _FIRST_LOOK:
            return self._steps % 2 == 0
        return n % self.every == 0 and not (self.every == 1 and self._steps % _PROBE == 0)

    def _measure(self, stall: float | None) -> None:
        """File the time since the last step began under what that step had to carry."""
        now = self._clock()
        if self._began is not None and self._steps > _WARM_UP:
            (self._without if stall is None else self._with).append(now - self._began)
            if stall is not None:
                self._stalls.append(stall)
        self._began = now

    def _share(self) -> float:
        """Returns the cost of a snapshot, in steps; infinite if it is not known yet."""
        if min(len(self._with), len(self._without)) < _FEWEST:
            return math.inf
        base = statistics.median(self._without)
        cost = max(statistics.median(self._with) - base, statistics.median(self._stalls))
        return cost / max(base, 1e-9)

    def _decide(self, share: float) -> None:
        if math.isnan(share):
            every, why = 1, "the ranks can't agree on what a snapshot costs"
        elif math.isinf(share):
            return
        else:
            every = max(1, math.ceil(share / self._budget - 1e-9))
            why = f"a snapshot costs {100 * share:.2g} % of a step, the budget is {100 * self._budget:.2g} %"
        if every > self.every or every <= _STICKY * self.every or math.isnan(share):
            if every != self.every:
                log.info("snapshots every %d step(s) from now on, was %d: %s", every, self.every, why)
            self.every = every


Cadence = Fixed | Auto


def cadence_of(every: int | Literal["auto"], budget: float, world: int) -> Cadence:
    """The cadence for ``snapshot_every`` and ``snapshot_budget``. A collective for "auto"."""
    return Auto(budget, agreement(world)) if every == "auto" else Fixed(every)


def agreement(world: int) -> Agreement:
    """Returns a way to the largest of all ranks' numbers, over a group of its own. A collective, as is each use of it.

    A number that can't be had, a rank being gone, is NaN.
    """
    if world == 1:
        return lambda number: lambda: number
    group = dist.new_group(backend="gloo", timeout=_AGREE_WITHIN)

    def ask(number: float) -> Callable[[], float]:
        value = torch.tensor([number], dtype=torch.float64)
        try:
            work = dist.all_reduce(value, dist.ReduceOp.MAX, group=group, async_op=True)
        except RuntimeError:
            return lambda: math.nan

        def answer() -> float:
            try:
                work.wait()
            except RuntimeError:
                return math.nan
            return value.item()

        return answer

    return ask
