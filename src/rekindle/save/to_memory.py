"""Saves into the memory store: a snapshot is begun inside of ``step()``, and completed while training goes on."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from rekindle.common.os_errors import describe_error
from rekindle.errors import MemoryStoreError, RekindleError, UsageError
from rekindle.format.lineage import ShardId
from rekindle.format.receipt import Receipt, read_file
from rekindle.memory.lock import Lock
from rekindle.memory.slots import Slot, Slots
from rekindle.save.copy import Copying, fingerprints
from rekindle.save.live import Live
from rekindle.save.plan import CopyPlan
from rekindle.settings import Overlap

__all__ = ["Changed", "Flight", "MemorySaver"]


_WRITE = 2.0
"""Seconds for which a write to a tensor may outlast the copy of everything."""
_PEEK = 0.0002, 0.005
"""Seconds between two looks at what the trainer is doing: at first, doubled each time, and at most."""

_HARMLESS = {"threading", "torch.autograd.graph", "torch.distributed.distributed_c10d"}
"""Modules in which the trainer waits, for somebody or for a backward pass: it may take long, or not end at all."""


class Changed(UsageError):
    """Tensors were changed after ``step()`` by something that no fence stands before. ``names`` says which."""

    def __init__(self, step: int, names: Collection[str]) -> None:
        self.names = names
        some = ", ".join(sorted(names)[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        super().__init__(
            f"{some}: changed between ckpt.step({step}) and the optimizer's next step(), by something else than that "
            "step(): do it before ckpt.step(), or inside of 'with ckpt.updating():'"
        )


@dataclass
class Flight:
    """One snapshot, from the moment at which ``step()`` returns until it is committed. Safe to use from any thread."""

    stamp: ShardId
    plan: CopyPlan
    values: bytes
    slot: Slot
    slots: Slots
    copying: Copying
    expected: dict[int, str]
    """Checksums, by number, of what is copied late, taken at the start if the copy is to be verified."""
    versions: list[int] = field(init=False)
    checksums: list[str] = field(default_factory=list)
    committed: bool = False
    error: BaseException | None = None
    """What went wrong."""
    _trainer: int = field(default_factory=threading.get_ident)
    _held: bool = False
    _judged: threading.Event = field(default_factory=threading.Event)
    _landed: bool = False
    _judging: threading.Lock = field(default_factory=threading.Lock)
    _landing: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self.versions = self._versions()

    def _versions(self) -> list[int]:
        return [tensor._version for tensor in self.plan.watched.values()]

    def behind(self) -> None:
        """All that is left to do, by the thread that runs beside training."""
        try:
            self.copying.queue()
            self.copying.help()
        finally:
            self.land()

    def hold(self) -> None:
        """Return when the state may change; on the host, when the snapshot is committed. ``error`` as for ``land``."""
        first, self._held = not self._held, True
        if self._landed and not (first and self.expected):
            return
        try:
            self.copying.hold()
            self.judge()
            if first and self.expected:  # optimizers update one after the other: only the first finds all as it was
                self._compare(fingerprints(self.plan))
        except Exception as error:
            self.error = self.error or error
        if self.copying.holds_all:
            self.land()

    def land(self) -> None:
        """Wait for the copy and commit it. Doesn't raise: ``error`` tells what went wrong."""
        if threading.get_ident() == self._trainer:  # which is here, so none of its writes is under way
            self.judge()
        with self._landing:
            if self._landed:
                return
            try:
                self.checksums = self.copying.finish()
                self._let_writes_end()
                self.judge()
                self._compare(self.checksums)
                if self.error is not None:
                    raise self.error
                self.slots.commit(self.slot, self.stamp, self.receipt())
                self.committed = True
            except Exception as error:
                self.error = self.error or error
            except BaseException:  # the caller's own; whoever asks later is told of it, and not given it again
                self.error = RekindleError("the save was interrupted")
                raise
            finally:
                self._landed = True

    def _let_writes_end(self) -> None:
        """Return when a write that began during the copy is over: torch counts it then, and not before.

        So it is once the trainer has gone on from where it is now. What takes it longer than any write, such as a wait
        for other ranks, isn't waited for.
        """
        if self._judged.is_set():
            return
        place, deadline = _place(self._trainer), time.monotonic() + _WRITE
        pause, longest = _PEEK
        while place is not None and place == _place(self._trainer) and time.monotonic() < deadline:
            if self._judged.wait(pause):
                return
            pause = min(2 * pause, longest)

    def judge(self) -> None:
        """See, once and before the first update, that nothing has changed the state since the start; else ``error``.

        For the trainer, or while nothing changes the state.

        Writes past torch's version counters are only found by hashes.
        """
        with self._judging:
            if not self._judged.is_set():
                pairs = zip(self.plan.watched, self.versions, self._versions(), strict=True)
                names = {name for name, before, after in pairs if before != after}
                if names:
                    self.error = self.error or Changed(self.stamp.step, names)
                self._judged.set()

    def _compare(self, found: Mapping[int, str] | Sequence[str]) -> None:
        changed = {number for number, expected in self.expected.items() if found[number] != expected}
        if changed:
            raise Changed(self.stamp.step, {self.plan.layout.tensor_of(number) for number in changed})

    def receipt(self) -> bytes:
        return Receipt.encode(self.stamp, self.plan.static, self.checksums, self.values)


def _place(thread: int) -> tuple[int, int] | None:
    """Where another thread is in code other than torch's; None if nowhere, or where it writes to no parameter.

    That place stays the same until a call into torch returns, whatever Python that runs: compiled code, dispatch.
    """
    frame = sys._current_frames().get(thread)
    if frame is not None and frame.f_globals.get("__name__") in _HARMLESS:
        return None
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] == "torch":
        frame = frame.f_back
    return None if frame is None else (id(frame), frame.f_lasti)


class MemorySaver:
    """Copies the state into a slot and commits it. The agent does the rest.

    For the thread that trains, but for ``hold``.
    """

    def __init__(self, live: Live, slots: Slots, overlap: Overlap) -> None:
        self._live = live
        self.slots = slots
        self._overlap = overlap
        self.flight: Flight | None = None
        """The newest save that didn't fail at once."""
        self.in_step = False
        """Whether ``save`` saw the newest one to its end, well or not."""
        self._torn = False
        """Whether a save has left the slots behind in an unknown state."""

    def save(self, stamp: ShardId, owner: object) -> int:
        """Bytes to be saved. Raises MemoryStoreError when memory has no room, or is gone. Call ``settle`` first.

        Parameters and optimizer state may still be on their way when this returns; ``owner`` lives until they are not.
        """
        plan, values = self._live.take(stamp)
        try:
            self.mend()
            slot = self.slots.acquire(stamp.step, stamp.incarnation, plan.layout.file_bytes)
            assert slot.map is not None
            expected = fingerprints(plan) if self._overlap == "verify" else {}
            copying = self._live.writer.start(plan, slot.map, slot.cache, stamp.step)
            slot.cache = copying.target
            self.flight = flight = Flight(stamp, plan, values, slot, self.slots, copying, expected)
            self.in_step = not (plan.late and self._overlaps(plan))
            if self.in_step:
                flight.land()
        except MemoryStoreError:
            raise
        except BaseException as error:  # a signal handler may raise between any two instructions, Ctrl-C's for one
            self.flight, self._torn = None, True
            if isinstance(error, OSError):
                raise MemoryStoreError(f"memory store {self.slots.job.path}: {describe_error(error)}") from error
            raise
        if not self.in_step:
            self._live.writer.behind(partial(_fly, flight, owner))
        return plan.layout.file_bytes

    def _overlaps(self, plan: CopyPlan) -> bool:
        return not plan.fits_in_step if self._overlap == "auto" else bool(self._overlap)

    def mend(self) -> None:
        """Begin again from the files, if a save has broken off. Raises OSError when that can't be."""
        if self._torn:
            self.slots.recover()
            self._torn = False

    def come_back(self, lock: Lock) -> bool:
        """Begin again from the files, and from none if somebody has removed them: then True. Raises OSError."""
        removed = self.slots.job.retake(lock)
        self.flight, self._torn = None, True
        return removed

    def gasp(self, stamp: ShardId, whole: bool) -> None:
        """Bring the state, which is that of ``stamp``, into memory. For any thread, while nothing changes the state.

        With ``whole`` all that this rank holds, if another rank hasn't brought its part. Raises MemoryStoreError when
        memory has no room, another RekindleError when the state can't be had.
        """
        flight = self.flight
        if flight is not None and flight.stamp.step == stamp.step:
            flight.judge()
            flight.land()
            if flight.committed and (not whole or self.complete(stamp) or flight.plan is flight.plan.whole):
                self.persist(stamp)
                return
            if isinstance(flight.error, Changed):
                raise flight.error
        plan = self._live.plan(stamp, whole)
        self.mend()
        slot = self.slots.acquire(stamp.step, stamp.incarnation, plan.layout.file_bytes, gasp=True)
        assert slot.map is not None
        try:
            receipt = self._live.write(stamp, plan, slot.map)
        except BaseException:
            slot.unlock()
            raise
        self.slots.commit(slot, stamp, receipt)

    def complete(self, stamp: ShardId) -> bool:
        """Whether all ranks of this node have brought their parts of the step."""
        return stamp.checkpoint in self.slots.complete()

    def hold(self) -> None:
        """Return when the state may change. For the thread that updates it."""
        if self.flight is not None:
            self.flight.hold()

    def settle(self) -> Flight | None:
        """See the newest save to its end. It is returned once if something went wrong with it."""
        flight = self.flight
        if flight is None:
            return None
        flight.land()
        if flight.error is None:
            return None
        self.flight = None
        if isinstance(flight.error, Changed):
            self._live.capture.distrust(flight.error.names)
        if isinstance(flight.error, (Changed, MemoryStoreError)):
            flight.slot.unlock()
        else:
            self._torn = True  # threads may still be writing into the slot
            self._live.capture.begin_anew()
        return flight

    def persist(self, newest: ShardId, pin: bool = False) -> None:
        """Ask the agent to carry this start's snapshots up to ``newest`` to storage, and to ``pin`` that one there.

        It takes the newest that all ranks have, which is an older one where another rank has failed to save. Call
        ``settle`` first.
        """
        ours = newest.rank, newest.incarnation
        found = [(s, path) for s, path in self.slots.job.snapshots.shard_ids() if (s.rank, s.incarnation) == ours]
        for stamp, path in sorted(found, key=lambda one: one[0].step, reverse=True):  # none is asked for needlessly
            wanted = replace(stamp, persist=True, pinned=stamp.pinned or (pin and stamp.step == newest.step))
            if stamp.step <= newest.step and wanted != stamp:
                self.slots.write_receipt(wanted, Receipt.decode(read_file(path), path).with_stamp(wanted))
                for slot in self.slots.slots:
                    slot.stamp = wanted if slot.stamp == stamp else slot.stamp

    def close(self) -> None:
        self.slots.close()


def _fly(flight: Flight, owner: object) -> None:
    flight.behind()
