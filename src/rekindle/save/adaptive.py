"""Takes snapshots as often as a share of training's speed pays for, at the same steps on all ranks."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable

from rekindle.common.durations import describe_seconds
from rekindle.save.snapshot_price import SnapshotPrice
from rekindle.save.step_lengths import Step

__all__ = ["Adaptive"]

log = logging.getLogger("rekindle")

_LISTEN_AFTER = 2
"""Steps between asking the other ranks and acting on what they say, so that nobody waits for the answer."""
_ASK_EVERY = 100
"""Most steps between two questions: so soon any change is followed."""
_SETTLES = 8
"""Number of which a start's steps so far are divided to get the steps until the next question: at first they are
asked often."""
_LONG = 16
"""Interval in steps from which on each snapshot's price is asked for as soon as it is known."""
_PRICED_AFTER = 4
"""Steps after a snapshot by which its price is likely to be known, also where devices are behind the host."""
_UNKNOWN = 64.0
"""Most steps until the next snapshot while the price of one is not known."""
_PROBE = 32
"""With a snapshot at every step, each so many-th is left out to see what a step takes without one."""
_STICKY = 0.75
"""A longer interval is kept until a shorter one, of at most this share of it, would do."""
_PATIENCE = 1.5
"""Factor between the times, from the first try on, at which a snapshot is tried again that some rank has missed.
Those of the others are in vain meanwhile."""


class Adaptive:
    """Finds the smallest interval at which snapshots slow training by at most ``budget`` (0.01 is 1 %).

    The first step has a snapshot. From what it has cost the interval follows, and is adapted as training goes on. A
    rank whose snapshots are small wants one at each step. All ranks do alike, because ``agree`` tells each the longest
    interval of all.
    """

    def __init__(
        self,
        budget: float,
        world: int,
        agree: Callable[[float], Callable[[], float]],
        price: SnapshotPrice,
        is_small: Callable[[], bool],
        *,
        small: bool,
        reports: bool = True,
    ) -> None:
        """``agree`` as in ``rekindle.save.cadence``. ``is_small`` is asked about this rank, ``small`` is of all
        at the start.

        ``reports``: True on the rank that logs changes.
        """
        self.every = 1 if small else int(_UNKNOWN)
        """Steps between snapshots, as it is now."""
        self.number = 0
        """Snapshots that were due so far, on all ranks the same."""
        self._budget, self._alone, self._agree = budget, world == 1, agree
        self._price, self._is_small, self._reports = price, is_small, reports
        self._each = small
        """True while the snapshots of all ranks are small."""
        self._settled = small
        """False while the price of a snapshot is not known to all ranks."""
        self._steps = 0
        self._newest = 0
        """The step that was due last."""
        self._due_at = 1.0
        self._ask_at = _ASK_EVERY if small else 2
        self._answer: Callable[[], float] | None = None
        self._listen_at = 0
        self._lacking = False
        """True if this rank has no snapshot of the newest one."""
        self._first_try: int | None = None
        """The first step that was due of those that some rank has missed since the newest that none has."""
        self._apart = False
        """True once the ranks can't agree any more."""
        self._logged_every, self._log_at = self.every, 0

    def log_start(self) -> None:
        """Log how often there will be snapshots, and what that means, unless each step has one."""
        if self._reports and not self._each:
            log.info(
                "snapshots as often as slows training by at most %.2g %% (snapshot_every='auto', snapshot_budget): the "
                "first one after the first step, the next one once its cost is paid off; the log reports "
                "the interval. A step between two of them is secured by guard() if ranks fail, and others have all of "
                "its state; if all ranks die at once, the job goes back to the newest snapshot",
                100 * self._budget,
            )

    def measured(self, step: Step) -> None:
        """Take account of the length of a step."""
        self._price.add(step)

    def due(self, n: int, *, missed: bool = False, forced: bool = False) -> bool:
        """Returns True if step ``n`` is to have a snapshot. Called once a step, in order.

        ``missed``: this rank has no snapshot of the step before, which was due, because memory was being made, or it
        failed. ``forced``: the step is saved in any case, on all ranks.
        """
        self._steps += 1
        self._note_missed(missed)
        if self._apart:
            return self._choose_alone(n)
        self._listen()
        if self._answer is None and self._is_time_to_ask():
            self._answer, self._listen_at = self._agree(self._wanted()), self._steps + _LISTEN_AFTER
            if self._alone:
                self._listen()
        probes = self.every == 1 and not self._each and self._steps % _PROBE == 0
        due = self._steps >= self._due_at and not probes
        if due or forced:
            self._newest, self._due_at = self._steps, self._steps + self.every
            self.number += 1
        return due

    def _note_missed(self, missed: bool) -> None:
        if self._newest == self._steps - 1:
            self._lacking = missed
        if self._lacking and self._alone:  # no other rank's snapshot is in vain if it is missed again
            self._due_at = self._steps

    def _is_time_to_ask(self) -> bool:
        priced = self.every >= _LONG and self._steps == self._newest + _PRICED_AFTER
        return priced or self._steps >= self._ask_at

    def _wanted(self) -> float:
        """Returns the interval that suits this rank, in steps: infinite if it lacks a snapshot, 0 if it is small."""
        if self._lacking:
            return math.inf
        if self._is_small():
            return 0.0
        known = self._price.known()
        if known is None:
            return _UNKNOWN
        price, bare = known
        return max(price / (self._budget * bare), 1e-9)

    def _listen(self) -> None:
        if self._answer is None or (self._steps < self._listen_at and not self._alone):
            return
        answer, self._answer = self._answer(), None
        settled = _ASK_EVERY if answer == 0.0 else min(_ASK_EVERY, self._steps // _SETTLES)
        self._ask_at = self._steps + max(1, settled)
        if math.isnan(answer):
            self._part()
        elif math.isinf(answer):
            self._try_again()
        else:
            self._first_try = None
            self._decide(answer)

    def _part(self) -> None:
        """From now on choose without the others."""
        self._apart = True
        self._choose_power()
        self._logged_every, self._log_at = self.every, 0
        if self._reports:
            log.warning(
                "the ranks can't agree any more on what a snapshot costs: each takes one at the multiples of a power "
                "of two, by its own measure, rank 0 every %d steps. Up to so many are lost if all ranks die at once, "
                "and more if snapshots cost another rank more",
                self.every,
            )

    def _choose_alone(self, n: int) -> bool:
        """Returns True if step ``n`` is a multiple of the power of two that suits this rank: others share every one of
        their own power, or of this one."""
        self._choose_power()
        if self.every > self._logged_every:
            self._log_at = 0  # more is at stake than was said
        self._log_change()
        self.number += 1
        return n % self.every == 0

    def _choose_power(self) -> None:
        wanted = self._wanted()
        if not math.isinf(wanted):
            self.every = 1 << max(0, math.ceil(math.log2(max(wanted, 1.0))))

    def _try_again(self) -> None:
        """Have the snapshot tried again that some rank has missed, ever more rarely."""
        if self._first_try is None:
            self._first_try = self._newest
        tried = self._newest - self._first_try
        self._due_at = min(self._due_at, self._first_try + _PATIENCE * tried)
        self._ask_at = self._steps + 1

    def _decide(self, wanted: float) -> None:
        every = max(1, math.ceil(wanted - 1e-7))
        sticky = _STICKY if self._settled else 1.0
        self._each, self._settled = wanted == 0.0, wanted != _UNKNOWN
        if every > self.every or every <= sticky * self.every:
            self.every = every
            self._due_at = self._newest + every
        self._log_change()

    def _log_change(self) -> None:
        """Log the interval once it has doubled or halved, at most once for each doubling of the steps so far."""
        known = self._price.known()
        ratio = self.every / self._logged_every
        if not self._reports or known is None or self._steps < self._log_at or 0.5 < ratio < 2:
            return
        price, bare = known
        self._logged_every, self._log_at = self.every, 2 * self._steps
        log.info("%s", _describe(self.every, price, bare, self._budget))


def _describe(every: int, price: float, bare: float, budget: float) -> str:
    often = "at every step" if every == 1 else f"every {every} steps, {describe_seconds(every * bare)}"
    return (
        f"snapshots {often} from now on: on rank 0 one takes {describe_seconds(price)} of training, a step without one "
        f"{describe_seconds(bare)}, and snapshots may take {100 * budget:.2g} % of training (snapshot_budget). Up to "
        f"{every} step(s) are lost if all ranks die at once, or one of whose state no other has a copy"
    )
