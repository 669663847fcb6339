"""Chooses the interval between snapshots: a fixed number of steps, a fixed time, or the one with the least waste."""

from __future__ import annotations

import logging
import math
import statistics
from collections import deque
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist

from rekindle.common.durations import describe_seconds
from rekindle.common.waste import best_interval
from rekindle.save.step_clock import StepClock
from rekindle.save.timed import Timed
from rekindle.settings import Settings

__all__ = ["Auto", "Cadence", "Fixed", "agreement", "cadence_of"]

log = logging.getLogger("rekindle")

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

    Where faults are so rare that such snapshots cost more than what they save, the interval is longer: the one with
    the least waste of both (``rekindle.common.waste``).

    The cost of a snapshot is the median time of a step that has one to hide behind it, less that of a step that has
    not, and at least the time for which training was seen to stand still. All ranks choose alike, because ``agree``
    tells each the longest interval of all.
    """

    def __init__(
        self,
        budget: float,
        agree: Agreement,
        clock: StepClock,
        *,
        between_faults: float | None = None,
    ) -> None:
        """``between_faults``: mean seconds between two faults; None while there was none, and the budget decides."""
        self.every = 1
        self._between_faults = between_faults
        self._budget, self._agree, self._clock = budget, agree, clock
        self._with: deque[float] = deque(maxlen=16)
        self._without: deque[float] = deque(maxlen=64)
        self._stalls: deque[float] = deque(maxlen=16)
        self._answer: Callable[[], float] | None = None
        self._answer_at = 0

    def due(self, n: int, stall: float | None) -> bool:
        self._measure(stall)
        steps = self._clock.count
        if steps == _FIRST_LOOK or steps % _LOOK_EVERY == 0:
            self._answer, self._answer_at = self._agree(self._wanted()), steps + _LISTEN_AFTER
        if self._answer is not None and steps >= self._answer_at:
            self._decide(self._answer())
            self._answer = None
        if steps <= _FIRST_LOOK:
            return steps % 2 == 0
        return n % self.every == 0 and not (self.every == 1 and steps % _PROBE == 0)

    def _measure(self, stall: float | None) -> None:
        """File the length of the newest step under what that step had to carry."""
        took = self._clock.took
        if took is not None and self._clock.is_warm:
            (self._without if stall is None else self._with).append(took)
            if stall is not None:
                self._stalls.append(stall)

    def _wanted(self) -> float:
        """Returns the interval that suits this rank, in steps; infinite if it is not known yet."""
        cost, base = self._cost()
        if math.isinf(cost):
            return math.inf
        rare = 0.0 if self._between_faults is None else best_interval(cost, self._between_faults)
        return max(cost / self._budget, rare) / base

    def _cost(self) -> tuple[float, float]:
        """Returns the seconds that a snapshot costs, infinite if it is not known yet, and those of a step without."""
        if min(len(self._with), len(self._without)) < _FEWEST:
            return math.inf, 1.0
        base = statistics.median(self._without)
        return max(statistics.median(self._with) - base, statistics.median(self._stalls)), max(base, 1e-9)

    def _decide(self, wanted: float) -> None:
        if math.isinf(wanted):
            return
        apart = math.isnan(wanted)
        every = 1 if apart else max(1, math.ceil(wanted - 1e-7))
        if every > self.every or every <= _STICKY * self.every or apart:
            if every != self.every:
                why = "the ranks can't agree on what a snapshot costs" if apart else self._describe()
                log.info("snapshots every %d step(s) from now on, was %d: %s", every, self.every, why)
            self.every = every

    def _describe(self) -> str:
        """Returns words on what this rank has measured."""
        cost, base = self._cost()
        why = f"a snapshot costs {100 * cost / base:.2g} % of a step, the budget is {100 * self._budget:.2g} %"
        if self._between_faults is not None:
            why += f", and a fault has come every {describe_seconds(self._between_faults)}"
        return why


Cadence = Fixed | Timed | Auto


def cadence_of(settings: Settings, world: int, clock: StepClock, between_faults: float | None) -> Cadence:
    """The cadence for ``snapshot_every`` and ``snapshot_budget``. A collective unless steps are counted.

    ``clock`` ticks before each call of ``due``. ``between_faults`` as for ``Auto``.
    """
    if isinstance(settings.snapshot_every, int):
        return Fixed(settings.snapshot_every)
    if settings.snapshot_seconds is not None:
        return Timed(settings.snapshot_seconds, world, agreement(world), clock)
    return Auto(settings.snapshot_budget, agreement(world), clock, between_faults=between_faults)


def agreement(world: int) -> Agreement:
    """Returns a way to the largest of all ranks' numbers, over a group of its own. A collective, as is each use of it.

    A number that can't be had, a rank being gone, is NaN.
    """
    if world == 1:
        return lambda number: lambda: number
    group = dist.new_group(backend="gloo", timeout=_AGREE_WITHIN)

    def ask(number: float) -> Callable[[], float]:
        value = torch.tensor([number], dtype=torch.float64, device="cpu")
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
