"""Chooses the steps that are saved, and those that go to storage."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Collection
from typing import NamedTuple

import torch

from rekindle.save.adaptive import Adaptive
from rekindle.save.cadence import Cadence, Fixed
from rekindle.save.metrics import Metrics
from rekindle.save.pricing import Pricing
from rekindle.save.step_clock import StepClock
from rekindle.save.step_lengths import Load, StepLengths
from rekindle.save.timed import Timed
from rekindle.settings import Settings
from rekindle.storage.throttle import drain_interval

__all__ = ["DirectSaveLimit", "Schedule"]

log = logging.getLogger("rekindle")

_NO_MESH = "on several nodes whose agents don't reach each other to agree on steps: set persist_every to a number"
_APART_EVERY = 100
"""Steps between those that nodes send to storage which don't reach each other: they must choose the same ones."""
_LATER = " until it is known what that takes from training (persist_every='auto')"
_APART = ", the steps between two snapshots (snapshot_every)"
_UNLESS = ", unless other nodes' memory has all of the state, as under DDP and HSDP"


class _Counted(NamedTuple):
    """Numbers of ``Metrics`` as of a step."""

    saves: int = 0
    missed: int = 0
    stall: float = 0.0
    seconds: float = 0.0
    nbytes: int = 0

    @classmethod
    def of(cls, metrics: Metrics) -> _Counted:
        return cls(
            *(
                metrics.saves,
                metrics.left_out + metrics.failed,
                metrics.last_stall,
                metrics.snapshot_seconds,
                metrics.bytes_saved,
            ),
        )

    def load_since(self, before: _Counted) -> Load | None:
        """Returns the snapshot that was taken since; None if none was."""
        if self.saves == before.saves:
            return None
        return Load(self.stall, self.seconds - before.seconds, self.nbytes - before.nbytes)


class Schedule:
    """The steps of one start that are saved unasked. All ranks choose the same ones."""

    def __init__(
        self,
        settings: Settings,
        nodes: int,
        world: int,
        metrics: Metrics,
        clock: StepClock,
        cadence: Cadence,
        devices: Collection[torch.device] = (),
    ) -> None:
        """``clock`` is that of the cadence. ``devices`` hold the state, and work off queues."""
        every, seconds = settings.persist_steps, settings.persist_pause
        self._settings, self._peer_every = settings, settings.peer_every
        self.persist_every = every
        """Multiples of this go to storage; None where time decides."""
        chosen = settings.persist_every == "auto"
        self.pause = None if every is not None or (seconds == 0 and nodes == 1 and not chosen) else seconds
        """Least seconds between two snapshots that storage gets unasked; None if it gets none of them."""
        self._world, self._nodes = world, nodes
        self._meshed = nodes > 1
        """True on several nodes whose agents reach each other."""
        self.budget = settings.snapshot_budget if chosen else None
        """Share of training time that writes to storage may take, where the agent chooses their pause; else None."""
        self.clock, self._cadence, self._metrics = clock, cadence, metrics
        self._lengths = StepLengths(clock, devices)
        self.pricing: Pricing | None = None
        """Measures what saves cost; on the first rank of a node that has memory."""
        self._counted = _Counted()

    def do_without_mesh(self) -> None:
        """Has a number choose the steps for storage: nodes that don't hear of each other can't agree on others."""
        self._meshed = False
        if self.persist_every is None:
            self.persist_every, self.pause, self.budget = _APART_EVERY, None, None

    def due(self, n: int, *, memory: bool) -> bool:
        """True if step ``n`` is to be saved. Called once a step, in order.

        Without a ``memory`` store each save goes to storage, so only the steps for storage are saved, where a number
        chooses them.
        """
        self.clock.tick()
        if self.clock.took is not None:
            self._metrics.timed(self.clock.took)
        before, self._counted = self._counted, _Counted.of(self._metrics)
        steps = self._lengths.stepped(self._counted.load_since(before))
        if self.pricing is not None:
            self.pricing.stepped(steps)
        forced, cadence = self._is_multiple(n), self._cadence
        if isinstance(cadence, Adaptive):
            for step in steps:
                cadence.measured(step)
            due = cadence.due(n, missed=self._counted.missed > before.missed, forced=forced)
        else:
            due = cadence.due(n)
        self._metrics.snapshot_every = cadence.every
        if not memory and self.persist_every is not None:
            due = False
        return due or forced

    def persists(self, n: int) -> bool:
        """True if step ``n``, once saved, goes to storage as soon as that is free."""
        return self._is_multiple(n) or (self.persist_every is None and self.pause is None)

    def limit_direct_saves(self, took: Callable[[], float]) -> DirectSaveLimit | NoLimit:
        """Returns the limit of saves that go straight to storage. ``took`` as for DirectSaveLimit."""
        return DirectSaveLimit(self.pause, self._world, took) if self.pause else NoLimit()

    def place_of(self, n: int) -> int:
        """Returns the number of step ``n``, which is due, for a ``DirectSaveLimit``: its own multiples must be due."""
        return n if isinstance(self._cadence, Fixed) else self._cadence.number

    def _is_multiple(self, n: int) -> bool:
        return self.persist_every is not None and n % self.persist_every == 0

    def tell_how_often(self) -> None:
        """Log how often snapshots are taken, where their price decides."""
        if isinstance(self._cadence, Adaptive):
            self._cadence.log_start()

    def tell_cost_of_a_node(self) -> None:
        """Log the training that the loss of a node would lose. Silent where storage gets all that it can take."""
        lost, unless = "this node is", _UNLESS if self._nodes > 1 else ""
        if self._meshed and self._peer_every is not None:
            lost, unless = "more than one node is", ""
            log.info(
                "nodes copy from each other what only one of them has, one step after the other%s: if one node is "
                "lost, the job goes on from the newest step that is node-safe, which 'rekindle status' and "
                "metrics.node_safe_step tell (peer_every)",
                "" if self._peer_every == "auto" else f" of the multiples of {self._peer_every}",
            )
        if self.persist_every is not None:
            log.info(
                "storage gets every step that is a multiple of %d: if %s lost, up to %d steps are lost, and "
                "those made while the last of them was written (persist_every)%s",
                *(self.persist_every, lost, self.persist_every, unless),
            )
        elif self.pause:
            later = _LATER if self.budget is not None else ""
            apart = _APART if isinstance(self._cadence, Timed) or self._cadence.every > 1 else ""
            log.info(
                "storage gets the newest snapshot at most every %g s%s, and is written to for at most a tenth of the "
                "time: if %s lost, up to %g s of training%s and the time of one write are lost, and more if a write "
                "takes over %g s (persist_seconds, persist_every)%s. A fault of processes alone goes back to the "
                "newest snapshot in memory",
                *(self.pause, later, lost, self.pause, apart, self.pause / 10, unless),
            )

    def warn_of_ignored_seconds(self) -> None:
        """Warn of a time that was given, and decides nothing. The default of one can't be told from none."""
        every, seconds = self._settings.persist_every, self._settings.persist_seconds
        changed = seconds != Settings.persist_seconds
        if isinstance(every, str) and self.persist_every is not None:
            what, why = f"persist_every={every!r}", _NO_MESH
        elif changed and every is not None and every != "auto":
            what, why = f"persist_seconds={seconds:g}", "beside persist_every, which decides alone"
        elif changed and self.persist_every is not None:
            what, why = f"persist_seconds={seconds:g}", _NO_MESH
        else:
            return
        gets = "a checkpoint in that time"
        if self.persist_every is not None:
            gets = f"every step that is a multiple of {self.persist_every}"
        log.warning("%s has no effect %s. Storage gets %s", what, why, gets)

    def warn_of_direct_saves(self, why: str) -> None:
        """Warn of the price of having no memory store. ``why`` there is none begins the message."""
        price = "which slows training at each save"
        if self.pause is not None:
            price = (
                f"at most every {self.pause:g} s and for at most a tenth of the time: a process that dies loses what "
                "was trained since, unless guard() secures it (persist_seconds, persist_every)"
            )
        log.warning("%s. Checkpoints go straight to storage, %s.", why, price)


class NoLimit:
    """Stands in for a DirectSaveLimit where every save may go straight to storage."""

    def due(self, n: int) -> bool:
        return True

    def saved(self, n: int) -> None:
        pass

    def failed(self) -> None:
        pass

    def describe(self) -> str:
        return ""


class DirectSaveLimit:
    """Limits the saves that go straight to storage unasked: to one every ``seconds``, and to a tenth of the time.

    Steps are numbered, by their own number or, where time chooses them, one after the other.
    Several ranks choose alike without talking, so their saves are of one step: each takes multiples of a power of two,
    the smallest that lasts long enough by its own clock. Clocks and disks that differ by less than a factor of two make
    powers that are neighbours, which have every second multiple in common.
    """

    def __init__(
        self, seconds: float, world: int, took: Callable[[], float], clock: Callable[[], float] = time.monotonic
    ) -> None:
        """``took`` gives the seconds that the newest write has taken so far."""
        self._seconds, self._world, self._took, self._clock = seconds, world, took, clock
        self._last: tuple[int, float] | None = None

    def due(self, n: int) -> bool:
        """True if step ``n`` may be saved now. The first step always may."""
        if self._last is None:
            return True
        step, at = self._last
        passed, wanted = self._clock() - at, drain_interval(self._seconds, self._took())
        if self._world == 1 or n <= step:
            return passed >= wanted
        pace = max(passed, 1e-9) / (n - step)
        every = 1 << max(0, math.ceil(math.log2(max(wanted / pace, 1))))
        return n % every == 0 and passed >= wanted / 2

    def saved(self, n: int) -> None:
        """Step ``n`` is being written from now on."""
        self._last = n, self._clock()

    def failed(self) -> None:
        """The newest save failed. A single rank tries again at the next step; several keep to the steps they share."""
        if self._world == 1:
            self._last = None

    def describe(self) -> str:
        """Words for a message, between commas."""
        return f", at most every {self._seconds:g} s,"
