"""Chooses the interval between snapshots: a fixed number of steps, a fixed time, or the smallest that costs little."""

from __future__ import annotations

import math
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist

from rekindle.save.adaptive import Adaptive
from rekindle.save.capture import Capture
from rekindle.save.snapshot_price import SnapshotPrice
from rekindle.save.step_clock import StepClock
from rekindle.save.timed import Timed
from rekindle.session.group import ProcessGroup, SingleProcess
from rekindle.settings import Settings

__all__ = ["Cadence", "Fixed", "agreement", "cadence_of"]

_AGREE_WITHIN = timedelta(seconds=30)
"""Time for which ``step()`` waits for a rank that has not come as far. In most jobs it does not wait at all: a
collective of the job has waited before."""

Agreement = Callable[[float], Callable[[], float]]
"""Takes this rank's number, and returns a callable that later gives the largest of all ranks' numbers."""


class Fixed:
    """Takes a snapshot every ``every`` steps."""

    def __init__(self, every: int) -> None:
        self.every = every

    def due(self, n: int) -> bool:
        """Returns True if step ``n`` is to have a snapshot. Called once a step, in order."""
        return n % self.every == 0


Cadence = Fixed | Timed | Adaptive


def cadence_of(
    settings: Settings,
    group: SingleProcess | ProcessGroup,
    clock: StepClock,
    capture: Capture,
    *,
    memory: bool,
) -> Cadence:
    """The cadence for ``snapshot_every`` and ``snapshot_budget``. A collective unless steps are counted.

    ``clock`` ticks before each call of ``due``. Without ``memory`` a time limits saves, not their price.
    """
    if isinstance(settings.snapshot_every, int):
        return Fixed(settings.snapshot_every)
    world = group.world
    if settings.snapshot_seconds is not None:
        return Timed(settings.snapshot_seconds, world, agreement(group), clock)
    if not memory:
        return Fixed(1)
    small = all(group.gather(capture.is_small()))
    return Adaptive(
        settings.snapshot_budget,
        world,
        agreement(group),
        SnapshotPrice(),
        lambda: capture.fits_in_step,
        small=small,
        reports=group.rank == 0,
    )


def agreement(group: SingleProcess | ProcessGroup) -> Agreement:
    """Returns a way to the largest of all ranks' numbers, over a group of its own. A collective, as is each use of it.

    A number that can't be had, a rank being gone or very late, is NaN. A rank that evaluates, say, may be late by what
    the job's own collectives wait for: a shorter timeout would break this group meanwhile.
    """
    if group.world == 1:
        return lambda number: lambda: number
    own = dist.new_group(backend="gloo", timeout=timedelta(seconds=group.seconds))

    def ask(number: float) -> Callable[[], float]:
        value = torch.tensor([number], dtype=torch.float64, device="cpu")
        try:
            work = dist.all_reduce(value, dist.ReduceOp.MAX, group=own, async_op=True)
        except RuntimeError:
            return lambda: math.nan

        def answer() -> float:
            try:
                work.wait(_AGREE_WITHIN)
            except RuntimeError:
                return math.nan
            return value.item()

        return answer

    return ask
