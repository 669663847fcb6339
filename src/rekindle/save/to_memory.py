"""Saves into the memory store: a snapshot is begun inside of ``step()``, and completed while training goes on."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial

from rekindle.common.os_errors import describe_error
from rekindle.errors import MemoryStoreError
from rekindle.format.lineage import ShardId
from rekindle.format.metric import Metric
from rekindle.format.receipt import Receipt, read_file
from rekindle.memory.lock import Lock
from rekindle.memory.slot import Slot
from rekindle.memory.slots import NotReadyError, Slots
from rekindle.save.copy import BEFORE, Copying
from rekindle.save.fence import Fence, some_of
from rekindle.save.live import Live
from rekindle.save.pending import Changed, PendingSnapshot
from rekindle.save.plan import CopyPlan, MovedError
from rekindle.save.progress import StateMoved
from rekindle.save.witness import Look, Witness
from rekindle.settings import Overlap

__all__ = ["MemorySaver", "Pause"]

log = logging.getLogger("rekindle")

Pause = Callable[[str], AbstractContextManager[None]]
"""Lets the watchdog wait for what is named while the block runs."""

_CHOICE = 2.0
"""Seconds that the thread that trains gets to choose a slot, after a fault."""
_STANDSTILL = 1.0
"""Seconds without a batch after which a snapshot's copy counts as stuck, after a fault. Its side stream may share a
hardware queue with work that never ends, while others can be read. A batch takes some milliseconds."""


_FIRST, _EVERY = 2, 64
"""Snapshots from devices whose every byte is looked at before and after the copy: the first ones, and one in so many.
The device adds up integers, at the speed of its memory: two looks at 16 GB take an H200 some 10 ms."""


@dataclass(frozen=True)
class _Seen:
    """A look at the state of ``step``, until which so many ``updates`` had been announced."""

    look: Look
    whole: bool
    witness: Witness
    step: int
    updates: int


class MemorySaver:
    """Copies the state into a slot and commits it. The agent carries it on. For the thread that trains."""

    def __init__(self, live: Live, slots: Slots, overlap: Overlap, fence: Fence) -> None:
        self._live = live
        self._fence = fence
        self._witness: tuple[CopyPlan, Witness] | None = None
        """Looks at what is copied late by that plan."""
        self._seen: _Seen | None = None
        """Newest look at the state."""
        self._looks = 0
        """Snapshots that were copied beside training."""
        self.slots = slots
        self._overlap = overlap
        self.pending: PendingSnapshot | None = None
        """The newest save that didn't fail at once."""
        self.in_step = False
        """True if ``save`` saw the newest one to its end, well or not."""
        self._broken_off = False
        """True if a save has left the slots in an unknown state."""
        self._choosing = threading.Lock()
        """Held while a slot is chosen, in a gasp until it is written: else the thread that trains may be given it."""

    def save(self, stamp: ShardId, owner: object, pause: Pause | None = None) -> int:
        """Begin a save; returns its bytes. Raises MemoryStoreError when memory has no room, or is gone.

        Call ``finish`` first. Parameters and optimizer state may still be on their way when this returns; ``owner`` is
        kept alive until they are not. Memory that has to be made is waited for in a ``pause``; without one,
        NotReadyError is raised.
        """
        plan, values = self._live.take(stamp)
        try:
            with self._choosing:
                self._repair_slots()
                slot = self._acquire(stamp, plan.layout.file_bytes, pause)
            assert slot.map is not None
            witness = self._witness_of(plan) if plan.late and self._overlaps(plan) else None
            copying = self._begin(plan, slot, stamp.step, witness if self._fence.announced else None)
            self.pending = pending = PendingSnapshot(
                *(stamp, plan, values, slot, self.slots, copying, self._overlap == "verify"),
                counts=self._live.clock.counts,
            )
            self.in_step = not (copying.witness is not None and self._complete_behind(pending, owner))
            if self.in_step:
                pending.commit()
            if witness is not None and copying.witness is None:
                self._seek_unannounced(stamp.step, witness)
        except (MemoryStoreError, NotReadyError):
            raise
        except BaseException as error:  # a signal handler may raise between any two instructions, Ctrl-C's for one
            self.pending, self._broken_off = None, True
            if isinstance(error, OSError):
                raise MemoryStoreError(f"memory store {self.slots.job.path}: {describe_error(error)}") from error
            raise
        return plan.layout.file_bytes

    def _begin(self, plan: CopyPlan, slot: Slot, step: int, witness: Witness | None) -> Copying:
        """Begin the copy: beside training, with a ``witness``, or inside of ``step()``."""
        assert slot.map is not None
        whole = exact = self._overlap == "verify"
        if witness is not None:
            whole |= bool(plan.devices) and (self._looks < _FIRST or self._looks % _EVERY == 0)
            self._looks += 1
        copying = self._live.writer.start(plan, slot.map, slot.cache, step, witness, whole=whole, exact=exact)
        slot.cache = copying.target
        if witness is not None and copying.before is not None:
            self._seen = _Seen(copying.before, whole, witness, step, self._fence.updates)
        return copying

    def _witness_of(self, plan: CopyPlan) -> Witness | None:
        """Returns who looks at what ``plan`` copies late; None where that is copied inside of ``step()`` anyway."""
        if self._fence.distrusted:
            return None
        if self._witness is None or self._witness[0] is not plan:
            self._witness = plan, Witness(unit for batch in plan.late for unit in batch.units)
        return self._witness[1]

    def _seek_unannounced(self, step: int, witness: Witness) -> None:
        """Find out, at a step that no update was announced for, if the state is another than at the one before."""
        before, now = self._seen, self._fence.updates
        whole = before is not None and before.whole
        look = witness.look(BEFORE, whole=whole)
        look.read()
        if before is not None and before.witness is witness and before.updates == now and before.look.kept:
            changed = look.differing(before.look)
            if changed:
                layout = self._live.capture.prepare()[0].layout
                self._fence.distrust(before.step, {layout.tensor_of(unit.block) for unit in changed})
        self._seen = _Seen(look, whole, witness, step, now)

    def _complete_behind(self, pending: PendingSnapshot, owner: object) -> bool:
        """Have the snapshot completed while training goes on. Returns False where no thread can be started for it."""
        try:
            self._live.writer.behind(partial(_complete, pending, owner))
        except RuntimeError:
            return False
        return True

    def _acquire(self, stamp: ShardId, nbytes: int, pause: Pause | None) -> Slot:
        try:
            return self.slots.acquire(stamp.step, stamp.incarnation, nbytes, wait=False)
        except NotReadyError:
            if pause is None:
                raise
        with pause("making memory for a snapshot"):
            return self.slots.acquire(stamp.step, stamp.incarnation, nbytes)

    def _overlaps(self, plan: CopyPlan) -> bool:
        return not plan.fits_in_step if self._overlap == "auto" else bool(self._overlap)

    def _repair_slots(self) -> None:
        """Read the slots anew from their files if a save has broken off. Raises OSError when that can't be done."""
        if self._broken_off:
            self.slots.recover()
            self._broken_off = False

    def make_third(self, start: str) -> None:
        """Have a third slot made if a drain needs it soon. ``start`` is the incarnation's id."""
        if self._choosing.acquire(blocking=False):  # else a gasp chooses a slot: training is over
            try:
                if not self._broken_off:
                    self.slots.make_third(start)
            finally:
                self._choosing.release()

    def reopen(self, lock: Lock) -> bool:
        """Begin again from the files in memory. Returns True if somebody has removed them. Raises OSError."""
        removed = self.slots.job.retake(lock)
        self.pending, self._broken_off = None, True
        return removed

    def gasp(self, stamp: ShardId, *, whole: bool) -> None:
        """Secure the state, which is that of ``stamp``, in memory. For any thread, while nothing changes the state.

        With ``whole`` all that this rank holds, if another rank hasn't secured its part. The newest save may be of a
        later step, to which devices have not come: it is left alone. Raises MemoryStoreError when memory has no room,
        another RekindleError when the state can't be had.
        """
        pending = self.pending
        if pending is not None and pending.stamp.step == stamp.step:
            pending.check_unchanged()
            pending.commit_while_moving(_STANDSTILL)
            if not pending.committed and isinstance(pending.error, Changed):
                raise pending.error
        if self._has(stamp) and (not whole or not self._live.shared or self.is_complete(stamp)):
            self.persist(stamp)
            return
        plan = self._live.plan(stamp, whole=whole)
        with self._slot_beside(pending, stamp, plan.layout.file_bytes) as slot:
            assert slot.map is not None
            receipt = self._live.write(stamp, plan, slot.map)
            if pending is not None and pending.stamp.step == stamp.step:
                pending.give_up()
            self.slots.commit(slot, stamp, receipt)

    @contextmanager
    def _slot_beside(self, pending: PendingSnapshot | None, stamp: ShardId, nbytes: int) -> Iterator[Slot]:
        """Yields a slot other than that of ``pending``, into which devices may still copy once they go on.

        If the block fails, its threads may still write to the slot; not if all was read, but the state has moved.
        """
        with self._choosing_aside():
            self._repair_slots()
            busy = pending.slot if pending is not None and not pending.committed else None
            slot = self.slots.acquire(stamp.step, stamp.incarnation, nbytes, gasp=True, busy=busy)
            try:
                yield slot
            except (StateMoved, MemoryStoreError):
                slot.unlock()
                raise
            except BaseException:
                slot.lost = True
                raise

    @contextmanager
    def _choosing_aside(self) -> Iterator[None]:
        """Lets no other thread choose a slot meanwhile, after a fault."""
        if not self._choosing.acquire(timeout=_CHOICE):
            raise MemoryStoreError("the thread that trains is stuck while it chooses a place for a snapshot")
        try:
            yield
        finally:
            self._choosing.release()

    def ask_storage(self, newest: ShardId) -> None:
        """Ask the agent to carry snapshots as ``persist`` does, in any thread after a fault. Raises as ``gasp``."""
        with self._choosing_aside():
            self.persist(newest)

    def _has(self, stamp: ShardId) -> bool:
        """True if this rank has committed a part of the step, or all of it."""
        return any(slot.stamp is not None and slot.stamp.checkpoint == stamp.checkpoint for slot in self.slots.slots)

    def wait_for_newest(self, timeout: float) -> int | None:
        """Wait for the newest save, for at most ``timeout`` seconds. Returns its step; None if it is not committed."""
        pending = self.pending
        return pending.stamp.step if pending is not None and pending.wait(timeout) else None

    def is_complete(self, stamp: ShardId) -> bool:
        """True if all ranks of this node have committed their parts of the step."""
        return stamp.checkpoint in self.slots.complete_checkpoints()

    def finish(self) -> PendingSnapshot | None:
        """Wait until the newest save has ended. Returns it, once, if it failed."""
        pending = self.pending
        if pending is None:
            return None
        pending.conclude()
        if pending.error is None:
            return None
        self.pending = None
        if isinstance(pending.error, Changed):
            if pending.error.counted:
                self._live.capture.copy_in_step(pending.error.names)
            else:
                self._fence.distrust(pending.stamp.step, pending.error.names)
        if isinstance(pending.error, (Changed, MemoryStoreError)):
            pending.slot.unlock()
        elif not pending.slot.lost:
            self._broken_off = True  # threads may still be writing into the slot
            self._live.capture.replan()
        if isinstance(pending.error, MovedError):
            names = {pending.plan.layout.tensor_of(unit.block) for unit in pending.error.units}
            log.warning("%s: copied inside of step() from now on, as memory was freed or resized", some_of(names))
            self._live.capture.copy_in_step(names)
        return pending

    def persist(self, newest: ShardId, *, pin: bool = False, metric: Metric | None = None) -> None:
        """Ask the agent to carry this start's snapshots up to ``newest`` to storage, and to ``pin`` that one there.

        ``metric`` is that of ``newest``, where it was told after the save.

        It takes the newest that all ranks have, which is an older one where another rank has failed to save. Call
        ``finish`` first.
        """
        ours = newest.rank, newest.incarnation
        found = [(s, path) for s, path in self.slots.job.snapshots.shard_ids() if (s.rank, s.incarnation) == ours]
        for stamp, path in sorted(found, key=lambda one: one[0].step, reverse=True):  # none is asked for needlessly
            wanted = replace(stamp, persist=True)
            if stamp.step == newest.step:
                wanted = replace(wanted, pinned=stamp.pinned or pin, metric=metric or stamp.metric)
            if stamp.step <= newest.step and wanted != stamp:
                self.slots.write_receipt(wanted, Receipt.decode(read_file(path), path).with_stamp(wanted))
                for slot in self.slots.slots:
                    slot.stamp = wanted if slot.stamp == stamp else slot.stamp

    def close(self) -> None:
        """Let go of the slots."""
        self.slots.close()


def _complete(pending: PendingSnapshot, owner: object) -> None:
    """Complete a snapshot in the background. ``owner`` is an argument only to be kept alive meanwhile."""
    pending.complete_in_background()
