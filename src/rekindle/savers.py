"""Two ways for a snapshot to go: into the memory store, or, where there is none, straight to storage."""

from __future__ import annotations

import logging
import mmap
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass, replace

from rekindle.errors import MemoryStoreError, NotDurableError
from rekindle.snapshot.documents import Receipt
from rekindle.snapshot.lineage import Stamp
from rekindle.snapshot.slots import Slots
from rekindle.state.capture import Capture, Plan
from rekindle.state.copy import ShardWriter
from rekindle.storage.posix import PosixStore

__all__ = ["DirectSaver", "MemorySaver"]

log = logging.getLogger("rekindle")

_WRITE_TIMEOUT = 1800.0
"""Seconds that a save waits for the one before it to reach storage."""


@dataclass
class _Committed:
    stamp: Stamp
    plan: Plan
    checksums: list[str]
    values: bytes


class MemorySaver:
    """Copies the state into a slot and commits it. The agent does the rest."""

    def __init__(self, capture: Capture, slots: Slots) -> None:
        self._capture = capture
        self.slots = slots
        self._writer = ShardWriter()
        self._last: _Committed | None = None

    def save(self, stamp: Stamp) -> int:
        """Bytes saved. Raises MemoryStoreError when memory has no room, or is gone."""
        plan, values = self._capture.prepare()
        try:
            slot = self.slots.acquire(stamp.step, stamp.incarnation, plan.layout.file_bytes)
            assert slot.map is not None
            slot.cache, checksums = self._writer.write(plan, slot.map, slot.cache, stamp.step)
            self.slots.commit(slot, stamp, Receipt.encode(stamp, plan.static, checksums, values))
        except MemoryStoreError:
            raise
        except BaseException:  # a signal handler may raise between any two instructions, Ctrl-C's for one
            self.slots.recover()
            raise
        self._last = _Committed(stamp, plan, checksums, values)
        return plan.layout.file_bytes

    def persist(self, step: int) -> None:
        """Ask the agent to carry the snapshot of ``step``, the newest one, to storage."""
        last = self._last
        if last is None or last.stamp.step != step or last.stamp.persist:
            return
        stamp = replace(last.stamp, persist=True)
        self.slots.write_receipt(stamp, Receipt.encode(stamp, last.plan.static, last.checksums, last.values))
        last.stamp = stamp

    def close(self) -> None:
        self._writer.close()
        self.slots.close()


class DirectSaver:
    """Copies the state into private memory; a thread writes it to storage while training goes on.

    Each save waits for the one before it, so that all ranks save the same steps without having to talk.
    """

    def __init__(self, capture: Capture, store: PosixStore, keep: int, keep_every: int | None) -> None:
        self._capture = capture
        self._store = store
        self._keep = keep, keep_every
        self._writer = ShardWriter()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="rekindle-direct")
        self._buffer: mmap.mmap | None = None
        self._cache: object = None
        self._writing: Future[None] | None = None

    def save(self, stamp: Stamp) -> int:
        """Bytes copied; storage gets them in the background. Call ``finish`` first."""
        plan, values = self._capture.prepare()
        nbytes = plan.layout.file_bytes
        if self._buffer is None or len(self._buffer) != nbytes:
            self._cache, self._buffer = None, mmap.mmap(-1, nbytes)
        self._cache, checksums = self._writer.write(plan, self._buffer, self._cache, stamp.step)
        receipt = Receipt.decode(Receipt.encode(stamp, plan.static, checksums, values), f"step {stamp.step}")
        self._writing = self._thread.submit(self._write, receipt, memoryview(self._buffer))
        return nbytes

    def _write(self, receipt: Receipt, data: memoryview) -> None:
        self._store.write_shard(receipt, data, lambda nbytes: None)
        if self._store.publish(receipt.stamp):
            self._store.prune(*self._keep)
            self._store.settle()

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
        self._writer.close()
