"""Keeps what is needed to save a step later: the state where it lives, and the local state of the newest put aside."""

from __future__ import annotations

import json
import logging
import mmap
from contextlib import suppress

import torch

from rekindle.devices.rescue import RescueStreams
from rekindle.devices.streams import SideStreams, resume_after
from rekindle.devices.table import has_queues
from rekindle.errors import RekindleError
from rekindle.format.lineage import ShardId
from rekindle.format.receipt import Receipt
from rekindle.memory.local_state import LocalStateWriter
from rekindle.memory.slots import Slots
from rekindle.save.capture import Capture
from rekindle.save.copy import ShardWriter
from rekindle.save.fence import Fence
from rekindle.save.local_state import KeptStep, LocalStateCapture
from rekindle.save.plan import CopyPlan
from rekindle.save.progress import DeviceClock
from rekindle.state.rng import RNG

__all__ = ["Live"]

log = logging.getLogger("rekindle")


class Live:
    """Reads the live state. For the thread that trains; ``plan`` and ``write`` for any, while nothing changes it."""

    def __init__(self, capture: Capture, slots: Slots | None, fence: Fence) -> None:
        """``slots``: None where there is no memory store, in whose files local states would outlive the process."""
        self.capture, self._fence = capture, fence
        self.writer = ShardWriter()
        self._rescuer: ShardWriter | None = None
        """Copies after a fault: the threads and side streams of ``writer`` may wait for a device that is stuck."""
        self.clock = DeviceClock()
        """Tells which step the devices hold. Used inside of ``guard()``."""
        self._slots = slots
        self._local: LocalStateCapture | None = None
        self._before_update: LocalStateCapture | None = None
        self._rescue_streams: RescueStreams | None = None
        """Streams by which devices are read after a fault; None before."""
        self._unsecured = False
        """True while local states can't be kept, which has been reported."""
        self._saved: tuple[int, list[str], bytes] | None = None
        """Step that was taken last, and its values with their paths."""
        self._told_of_changes = False

    def begin_guard(self) -> None:
        """From now on put aside, step by step, what ``plan`` needs."""
        self.clock.reset()
        self._rescuer = self._rescuer or ShardWriter(rescue=True)
        self._local, self._before_update = self._capture_local(), None

    def end_guard(self) -> None:
        """Put nothing aside any more."""
        self._local = self._before_update = None

    def _capture_local(self, *, before_update: bool = False) -> LocalStateCapture:
        slots = self._slots
        file = LocalStateWriter(slots.job, slots.rank, before_update=before_update) if slots is not None else None
        return LocalStateCapture(file, self.writer.behind, self.clock, self._fence.distrust)

    def close(self) -> None:
        """Wait for the threads, and end them."""
        for writer in (self.writer, self._rescuer):
            if writer is not None:
                writer.close()

    def note_update(self, stamp: ShardId) -> None:
        """Note that an update is about to begin, which will make the state that of ``stamp``."""
        if self._slots is not None:
            if self._before_update is None:
                self._before_update = self._capture_local(before_update=True)
            self._note(self._before_update, stamp)

    def note(self, stamp: ShardId) -> None:
        """Note that the state is that of ``stamp`` now, which is not to be saved."""
        if self._local is not None:
            self._note(self._local, stamp)

    def put_aside(self, stamp: ShardId) -> None:
        """Note it outside of ``guard()`` too: the step may be saved later by this process."""
        if self._local is None:
            self._local = LocalStateCapture(None, self.writer.behind, self.clock, self._fence.distrust)
        if self._local.stamp != stamp:  # else ``take`` has noted it
            self._note(self._local, stamp)

    def _note(self, local: LocalStateCapture, stamp: ShardId) -> None:
        try:
            self._take(local, stamp)
        except RekindleError as error:  # nobody has asked for a save: training goes on without a net
            self._complain(stamp.step, error)

    def _complain(self, step: int, error: Exception) -> None:
        if not self._unsecured:
            log.error(
                "step %d, and those after it, can't be secured if a rank fails; training goes on: %s", step, error
            )
        self._unsecured = True

    @property
    def alone(self) -> list[str]:
        """Tensors that no other rank is known to have, of the newest step noted or taken."""
        return self._local.alone if self._local is not None else []

    @property
    def shared(self) -> bool:
        """True if this rank copies only a part of what it holds, as of the newest step noted or taken."""
        return self._local is not None and self._local.shared

    def take(self, stamp: ShardId) -> tuple[CopyPlan, bytes]:
        """Note that the state is that of ``stamp`` now. Returns what to copy, and a receipt's values."""
        plan, values = self._take(self._local, stamp)
        self._saved = stamp.step, self.capture.paths, values
        return plan, values

    def _take(self, local: LocalStateCapture | None, stamp: ShardId) -> tuple[CopyPlan, bytes]:
        self._fence.catch_up()
        plan, values = self.capture.prepare()
        if local is not None:
            try:
                kept = local.take(stamp, plan, values)
                kept.announced = self._fence.announced_whole
                if local is not self._before_update:
                    self.clock.end_step(stamp.step, kept.events)
                local.store(kept, plan)
                if self._unsecured:
                    log.warning("step %d can be secured again", stamp.step)
                self._unsecured = False
            except (OSError, RekindleError) as error:  # a snapshot may still fit
                self._complain(stamp.step, error)
        return plan, values

    def warn_of_changes(self, step: int) -> None:
        """Warn, for the first time that is so, of values that have changed since ``step`` was taken.

        Generators don't count: they go on with whatever comes between two saves of a step.
        """
        if self._told_of_changes or self._saved is None or self._saved[0] != step:
            return
        _, paths, values = self._saved
        with suppress(Exception):  # what can't be saved any more is for the next step to tell
            _, now = self.capture.prepare()
            if now == values:
                return
            before = dict(zip(paths, json.loads(values), strict=True))
            after = dict(zip(self.capture.paths, json.loads(now), strict=True))
            every = [path for path in before | after if not path.startswith(f"{RNG}.")]
            changed = [p for p in every if p not in before or p not in after or before[p] != after[p]]
            if changed:
                self._told_of_changes = True
                log.warning(
                    "step %d stays as it was first saved, though values have changed since: %s. Change values before "
                    "the first ckpt.step(%d) or ckpt.save(%d)",
                    *(step, _list(changed), step, step),
                )

    def begin_update(self, step: int) -> None:
        """Note, inside of ``guard()``, that the update begins which makes ``step``. Costs nothing without devices."""
        if self._local is not None and self.clock.in_use:
            self._local.end_newest()
            self.clock.begin_update(step)

    def update_again(self) -> None:
        """Note, inside of ``guard()``, that one more update begins before the step's end."""
        if self._local is not None and self.clock.in_use:
            self.clock.update_again()

    def plan(self, stamp: ShardId, *, whole: bool) -> CopyPlan:
        """Returns the plan to copy all that this rank holds, or only its part, as it was at ``stamp``.

        That must be the step noted or taken last or, if devices are behind, the one that they hold. Raises
        RekindleError when that can't be done.
        """
        kept = self._find(stamp)
        self._require_announced(kept, stamp.step)
        kept.check()
        return kept.plan(whole=whole)

    def _require_announced(self, kept: KeptStep, step: int) -> None:
        """Raises RekindleError if the next update may have begun unseen. On the host a look at the state shows it."""
        if kept.devices and not (kept.announced and self._fence.announced_whole):
            raise RekindleError(
                f"no hook and no ckpt.updating() announced the update that made step {step}, so the next one may have "
                "begun unseen: what devices hold is not read"
            )

    def _find(self, stamp: ShardId) -> KeptStep:
        if self._local is None:
            raise RekindleError(f"step {stamp.step} has been completed, but not told to ckpt.step()")
        return self._local.find(stamp.step)

    def device_tensors(self) -> list[torch.Tensor]:
        """Returns the tensors of the state that are on devices. Raises RekindleError when it can't be saved."""
        plan, _ = self.capture.prepare()
        batches = [b for b in plan.whole.early + plan.whole.late if has_queues(b.device)]
        return [unit.source for batch in batches for unit in batch.units]

    def read_by(self, streams: RescueStreams) -> None:
        """From now on, after a fault, read devices by ``streams``: all others may be stuck."""
        self._rescue_streams = streams

    def write(self, stamp: ShardId, plan: CopyPlan, buffer: mmap.mmap) -> bytes:
        """Fill ``buffer`` by ``plan`` and return the receipt. Raises RekindleError when the state changes.

        That is a StateMoved when a device has begun the next update meanwhile. Also raised if one doesn't answer.
        """
        kept = self._find(stamp)
        writer = self._rescuer or self.writer
        streams = self._rescue_streams.streams() if self._rescue_streams is not None else {}
        if streams:
            writer.streams = SideStreams(streams)
        self.clock.enter()
        with resume_after(kept.events, streams):
            _, checksums = writer.write(plan, buffer, None, stamp.step)
        self.clock.check(stamp.step)
        kept.check()
        return Receipt.encode(stamp, plan.static, checksums, kept.values)


def _list(paths: list[str]) -> str:
    return ", ".join(paths[:3]) + (f" and {len(paths) - 3} more" if len(paths) > 3 else "")
