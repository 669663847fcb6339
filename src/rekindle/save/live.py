"""The newest step's state where it lives: what a step's end puts aside so that the step can still be saved later."""

from __future__ import annotations

import logging
import mmap

from rekindle.errors import RekindleError
from rekindle.format.lineage import ShardId
from rekindle.format.receipt import Receipt
from rekindle.memory.local_state import LocalStateWriter
from rekindle.memory.slots import Slots
from rekindle.save.capture import Capture
from rekindle.save.copy import ShardWriter
from rekindle.save.local_state import SmallState
from rekindle.save.plan import CopyPlan
from rekindle.state.device import after

__all__ = ["Live"]

log = logging.getLogger("rekindle")


class Live:
    """For the thread that trains; ``plan`` and ``write`` for any other one too, while nothing changes the state."""

    def __init__(self, capture: Capture, slots: Slots | None) -> None:
        """``slots``: None where there is no memory store, in whose files local states would outlive the process."""
        self.capture = capture
        self.writer = ShardWriter()
        self._slots = slots
        self._small: SmallState | None = None
        self._before_update: SmallState | None = None
        self._unsecured = False
        """Whether it has been said that small states can't be had."""

    def guard(self, on: bool) -> None:
        """From now on put aside, step by step, what ``plan`` needs; or no longer."""
        self._small = self._small_state(False) if on else None
        self._before_update = None

    def _small_state(self, before_update: bool) -> SmallState:
        slots = self._slots
        file = LocalStateWriter(slots.job, slots.rank, before_update) if slots is not None else None
        return SmallState(file, self.writer.behind)

    def note_update(self, stamp: ShardId) -> None:
        """An update is about to begin, which will make the state that of ``stamp``."""
        if self._slots is not None:
            if self._before_update is None:
                self._before_update = self._small_state(True)
            self._note(self._before_update, stamp)

    def note(self, stamp: ShardId) -> None:
        """The state is that of ``stamp`` now, which is not to be saved."""
        if self._small is not None:
            self._note(self._small, stamp)

    def put_aside(self, stamp: ShardId) -> None:
        """As ``note``, whether a fault is to be survived or not: the step may be saved later by this process."""
        if self._small is None:
            self._small = SmallState(None, self.writer.behind)
        self._note(self._small, stamp)

    def _note(self, small: SmallState, stamp: ShardId) -> None:
        try:
            self._take(small, stamp)
        except RekindleError as error:  # nobody has asked for a save: training goes on without a net
            self._complain(stamp.step, error)

    def _complain(self, step: int, error: Exception) -> None:
        if not self._unsecured:
            log.error("step %d, and those after it, can't be secured if a rank fails: %s", step, error)
        self._unsecured = True

    @property
    def alone(self) -> list[str]:
        """Of the newest step noted or taken: the tensors that no other rank is known to have."""
        return self._small.alone if self._small is not None else []

    @property
    def shared(self) -> bool:
        """Whether, at the newest step noted or taken, this rank copies only its part of what it holds."""
        return self._small is not None and self._small.shared

    def take(self, stamp: ShardId) -> tuple[CopyPlan, bytes]:
        """The state is that of ``stamp`` now: what to copy, and a receipt's values."""
        return self._take(self._small, stamp)

    def _take(self, small: SmallState | None, stamp: ShardId) -> tuple[CopyPlan, bytes]:
        plan, values = self.capture.prepare()
        if small is not None:
            try:
                small.take(stamp, plan, values)
                if self._unsecured:
                    log.warning("step %d can be secured again", stamp.step)
                self._unsecured = False
            except (OSError, RekindleError) as error:  # a snapshot may still fit
                self._complain(stamp.step, error)
        return plan, values

    def plan(self, stamp: ShardId, whole: bool) -> CopyPlan:
        """How to copy all that this rank holds, or only what is its to copy, as it was at ``stamp``, noted or taken
        last. Raises RekindleError when that can't be."""
        small = self._small
        if small is None or small.stamp is None or small.stamp.step != stamp.step:
            raise RekindleError(f"step {stamp.step} has been completed, but not told to ckpt.step()")
        return small.plan(whole)

    def write(self, stamp: ShardId, plan: CopyPlan, buffer: mmap.mmap) -> bytes:
        """Fill ``buffer`` with what ``plan`` said; gives the receipt. Raises RekindleError when the state changes."""
        assert self._small is not None
        with after(self._small.events):
            _, checksums = self.writer.write(plan, buffer, None, stamp.step)
        changed = self._small.changed()
        if changed:
            raise RekindleError(f"{changed[0]} has been changed since the end of step {stamp.step}")
        return Receipt.encode(stamp, plan.static, checksums, self._small.values)
