"""Two ways for a snapshot to go: into the memory store, or, where there is none, straight to storage."""

from __future__ import annotations

import logging
import mmap
import threading
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass, field, replace
from functools import partial

from rekindle.errors import MemoryStoreError, NotDurableError, RekindleError, UsageError
from rekindle.snapshot.documents import Receipt
from rekindle.snapshot.lineage import Stamp
from rekindle.snapshot.slots import Slot, Slots
from rekindle.state.copy import Copying, fingerprints
from rekindle.state.live import Live
from rekindle.state.plan import Plan
from rekindle.storage.pace import step_back
from rekindle.storage.posix import PosixStore

__all__ = ["Changed", "DirectSaver", "Flight", "MemorySaver"]

log = logging.getLogger("rekindle")

_WRITE_TIMEOUT = 1800.0
"""Seconds that a save waits for the one before it to reach storage."""


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

    stamp: Stamp
    plan: Plan
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
    _held: bool = False
    _judged: bool = False
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
            self._judge()
            if first and self.expected:  # optimizers update one after the other: only the first finds all as it was
                self._compare(fingerprints(self.plan))
        except Exception as error:
            self.error = self.error or error
        if self.copying.holds_all:
            self.land()

    def land(self) -> None:
        """Wait for the copy and commit it. Doesn't raise: ``error`` tells what went wrong."""
        with self._landing:
            if self._landed:
                return
            try:
                self.checksums = self.copying.finish()
                self._judge()
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

    def _judge(self) -> None:
        """See, once and before the first update, that nothing has changed the state since the start; else ``error``.

        Writes past torch's version counters are only found by hashes.
        """
        with self._judging:
            if not self._judged:
                pairs = zip(self.plan.watched, self.versions, self._versions(), strict=True)
                names = {name for name, before, after in pairs if before != after}
                if names:
                    self.error = self.error or Changed(self.stamp.step, names)
                self._judged = True

    def _compare(self, found: Mapping[int, str] | Sequence[str]) -> None:
        changed = {number for number, expected in self.expected.items() if found[number] != expected}
        if changed:
            raise Changed(self.stamp.step, {self.plan.layout.at(number) for number in changed})

    def receipt(self) -> bytes:
        return Receipt.encode(self.stamp, self.plan.static, self.checksums, self.values)


class MemorySaver:
    """Copies the state into a slot and commits it. The agent does the rest.

    For the thread that trains, but for ``hold``.
    """

    def __init__(self, live: Live, slots: Slots, overlap: bool, verify: bool) -> None:
        self._live = live
        self.slots = slots
        self._overlap, self._verify = overlap, verify
        self.flight: Flight | None = None
        """The newest save that didn't fail at once."""

    def save(self, stamp: Stamp, owner: object) -> int:
        """Bytes to be saved. Raises MemoryStoreError when memory has no room, or is gone. Call ``settle`` first.

        Parameters and optimizer state may still be on their way when this returns; ``owner`` lives until they are not.
        """
        plan, values = self._live.take(stamp)
        try:
            slot = self.slots.acquire(stamp.step, stamp.incarnation, plan.layout.file_bytes)
            assert slot.map is not None
            expected = fingerprints(plan) if self._verify else {}
            copying = self._live.writer.start(plan, slot.map, slot.cache, stamp.step)
            slot.cache = copying.target
            self.flight = flight = Flight(stamp, plan, values, slot, self.slots, copying, expected)
            late = bool(plan.late) and self._overlap
            if not late:
                flight.land()
        except MemoryStoreError:
            raise
        except BaseException:  # a signal handler may raise between any two instructions, Ctrl-C's for one
            self.flight = None
            self.slots.recover()
            raise
        if late:
            self._live.writer.behind(partial(_fly, flight, owner))
        return plan.layout.file_bytes

    def gasp(self, stamp: Stamp, whole: bool) -> None:
        """Bring the state, which is that of ``stamp``, into memory. For any thread, while nothing changes the state.

        With ``whole`` all that this rank holds, if another rank hasn't brought its part. Raises MemoryStoreError when
        memory has no room, another RekindleError when the state can't be had.
        """
        flight = self.flight
        if flight is not None and flight.stamp.step == stamp.step:
            flight.land()
            if flight.committed and (not whole or self.complete(stamp) or flight.plan is flight.plan.whole):
                self.persist(stamp.step)
                return
            if isinstance(flight.error, Changed):
                raise flight.error
        plan = self._live.plan(stamp, whole)
        slot = self.slots.acquire(stamp.step, stamp.incarnation, plan.layout.file_bytes)
        assert slot.map is not None
        try:
            receipt = self._live.write(stamp, plan, slot.map)
        except BaseException:
            slot.unlock()
            raise
        self.slots.commit(slot, stamp, receipt)

    def complete(self, stamp: Stamp) -> bool:
        """Whether all ranks of this node have brought their parts of the step."""
        return stamp.key in self.slots.complete()

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
            self.slots.recover()  # threads may still be writing into the slot
            self._live.capture.begin_anew()
        return flight

    def persist(self, step: int) -> None:
        """Ask the agent to carry the snapshot of ``step``, the newest one, to storage. Call ``settle`` first."""
        flight = self.flight
        if flight is None or flight.stamp.step != step or flight.stamp.persist:
            return
        flight.stamp = replace(flight.stamp, persist=True)
        self.slots.write_receipt(flight.stamp, flight.receipt())

    def close(self) -> None:
        self.slots.close()


def _fly(flight: Flight, owner: object) -> None:
    flight.behind()


class DirectSaver:
    """Copies the state into private memory; a thread writes it to storage while training goes on.

    Each save waits for the one before it, so that all ranks save the same steps without having to talk.
    """

    def __init__(self, live: Live, store: PosixStore, keep: tuple[int, int | None]) -> None:
        self._live = live
        self._store = store
        self._keep = keep
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="rekindle-direct", initializer=step_back)
        self._buffer: mmap.mmap | None = None
        self._cache: object = None
        self._writing: Future[None] | None = None

    def save(self, stamp: Stamp) -> int:
        """Bytes copied; storage gets them in the background. Call ``finish`` first."""
        plan, values = self._live.take(stamp)
        buffer = self._room(plan)
        self._cache, checksums = self._live.writer.write(plan, buffer, self._cache, stamp.step)
        self._submit(stamp, Receipt.encode(stamp, plan.static, checksums, values), buffer)
        return plan.layout.file_bytes

    def _room(self, plan: Plan) -> mmap.mmap:
        if self._buffer is None or len(self._buffer) != plan.layout.file_bytes:
            self._cache, self._buffer = None, mmap.mmap(-1, plan.layout.file_bytes)
        return self._buffer

    def gasp(self, stamp: Stamp, whole: bool) -> None:
        """Bring the state, which is that of ``stamp``, to storage: all of it or this rank's part.

        For any thread, while nothing changes the state.

        Raises OSError when storage refuses it, RekindleError when the state can't be had.
        """
        self.finish()
        plan = self._live.plan(stamp, whole)
        buffer = self._room(plan)
        self._submit(stamp, self._live.write(stamp, plan, buffer), buffer)
        error = self.finish()
        if error is not None:
            raise error

    def rescue(self, flight: Flight) -> None:
        """Write a snapshot that is whole but could not be committed to memory. Call ``finish`` first, and before the
        next save into memory."""
        assert flight.slot.map is not None
        self._submit(flight.stamp, flight.receipt(), flight.slot.map)

    def _submit(self, stamp: Stamp, raw: bytes, buffer: mmap.mmap) -> None:
        receipt = Receipt.decode(raw, f"step {stamp.step}")
        self._writing = self._thread.submit(self._write, receipt, memoryview(buffer)[: receipt.file_bytes])

    def _write(self, receipt: Receipt, data: memoryview) -> None:
        self._store.write_shard(receipt, data, lambda nbytes: None)
        if self._store.publish(receipt.stamp):
            self._store.prune(*self._keep)
            self._store.settle()

    @property
    def writing(self) -> bool:
        """Whether a save has not been seen to its end."""
        return self._writing is not None

    def finish(self, timeout: float = _WRITE_TIMEOUT) -> BaseException | None:
        """Wait until the last save is written, and tell what went wrong with it. Raises NotDurableError."""
        if self._writing is None:
            return None
        try:
            error = self._writing.exception(timeout)
        except FutureTimeout:
            raise NotDurableError(f"storage has not taken the last checkpoint within {timeout:.0f} s") from None
        self._writing = None
        return error

    def close(self) -> None:
        self._thread.shutdown(wait=self._writing is None or self._writing.done())
