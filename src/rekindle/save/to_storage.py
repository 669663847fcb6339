"""Saves straight to storage, for where there is no memory store, or none that works."""

from __future__ import annotations

import atexit
import logging
import mmap
import os
import time
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import suppress

from rekindle.common.timeouts import in_background
from rekindle.errors import NotDurableError
from rekindle.format.lineage import ShardId
from rekindle.format.receipt import Receipt
from rekindle.memory.job_dir import JobDir
from rekindle.save.live import Live
from rekindle.save.pending import PendingSnapshot
from rekindle.save.plan import CopyPlan
from rekindle.storage.checks import describe_recreated_root
from rekindle.storage.commit import Committer, SupersededError
from rekindle.storage.store import Store
from rekindle.storage.throttle import lower_priority

__all__ = ["DirectSaver"]

log = logging.getLogger("rekindle")

_WRITE_TIMEOUT = 1800.0
"""Seconds that a save waits for the one before it to reach storage."""
_AFTER_CLOSE = 10.0
"""Seconds that the end of a process does, if ``close()`` has waited for it in vain."""


class DirectSaver:
    """Copies the state into private memory; a thread writes it to storage while training goes on.

    Each save waits for the one before it, so that all ranks save the same steps without having to talk.
    """

    def __init__(
        self, live: Live, store: Store, keep: tuple[int | None, int | None], job: JobDir | None = None
    ) -> None:
        """``job``: where to note what is on storage, so that the next start knows it should storage be away."""
        self._live = live
        self._store = store
        self._keep = keep
        self._job = job
        self._committer: Committer | None = None
        self._buffer: mmap.mmap | None = None
        self._cache: object = None
        self._writing: Future[None] | None = None
        self._late = False
        """Whether a save has been waited for in vain: the next ones don't wait, and are not made while it hangs."""
        self._stamp: ShardId | None = None
        """What the newest save is of."""
        self._error: BaseException | None = None
        """What went wrong with it, once that was seen."""
        self._began = 0.0
        self._took: float | None = 0.0
        """When the newest write began, and the seconds that it took; None while it goes on."""
        self._at_exit = _WRITE_TIMEOUT
        self._pid = os.getpid()

    def save(self, stamp: ShardId) -> int:
        """Bytes copied; storage gets them in the background. Call ``finish`` first."""
        plan, values = self._live.take(stamp)
        buffer = self._room(plan)
        self._cache, checksums = self._live.writer.write(plan, buffer, self._cache, stamp.step)
        self._submit(stamp, Receipt.encode(stamp, plan.static, checksums, values), buffer)
        return plan.layout.file_bytes

    def _room(self, plan: CopyPlan) -> mmap.mmap:
        if self._buffer is None or len(self._buffer) != plan.layout.file_bytes:
            self._cache, self._buffer = None, mmap.mmap(-1, plan.layout.file_bytes)
        return self._buffer

    def gasp(self, stamp: ShardId, whole: bool) -> None:
        """Bring the state, which is that of ``stamp``, to storage: all of it or this rank's part.

        For any thread, while nothing changes the state.

        Raises OSError when storage refuses it, RekindleError when the state can't be had.
        """
        self.finish()
        self.late(stamp, whole)
        error = self.finish()
        if error is not None:
            raise error

    def late(self, stamp: ShardId, whole: bool) -> None:
        """As ``save``, of a step whose end has been told to ``Live`` before. Raises RekindleError when it can't be had.

        Call ``finish`` first.
        """
        plan = self._live.plan(stamp, whole)
        buffer = self._room(plan)
        self._submit(stamp, self._live.write(stamp, plan, buffer), buffer)

    def rescue(self, snapshot: PendingSnapshot) -> None:
        """Write a snapshot that is whole but could not be committed to memory. Call ``finish`` first, and before the
        next save into memory."""
        assert snapshot.slot.map is not None
        self._submit(snapshot.stamp, snapshot.receipt(), snapshot.slot.map)

    def _submit(self, stamp: ShardId, raw: bytes, buffer: mmap.mmap) -> None:
        receipt = Receipt.decode(raw, f"step {stamp.step}")
        data = memoryview(buffer)[: receipt.file_bytes]

        def work() -> None:
            lower_priority()
            try:
                self._write(receipt, data)
            finally:
                self._took = time.monotonic() - self._began

        self._stamp, self._error = receipt.stamp, None
        self._began, self._took = time.monotonic(), None
        self._writing = in_background(work, "rekindle-direct")
        atexit.unregister(self._finish_at_exit)  # once is enough
        atexit.register(self._finish_at_exit)
        self._late = False

    def _write(self, receipt: Receipt, data: memoryview) -> None:
        stamp = receipt.stamp
        if self._committer is None:
            self._committer = Committer(self._store, self._job)
        committer = self._committer
        try:
            newest = committer.begin(stamp)
            if newest is None and committer.root_deleted():
                log.warning("%s", describe_recreated_root(self._store.root, stamp.step))
            committer.write(receipt, data)
            if committer.commit(stamp, [stamp]):
                committer.tidy(stamp, *self._keep)
        except SupersededError as error:
            log.debug("%s", error)

    def took(self) -> float:
        """Seconds that the newest write has taken so far."""
        took = self._took
        return time.monotonic() - self._began if took is None else took

    @property
    def over(self) -> bool:
        """True if the newest save has ended, so that ``finish`` does not wait."""
        return self._writing is not None and self._writing.done()

    @property
    def writing(self) -> bool:
        """Whether a save has not been seen to its end."""
        return self._writing is not None

    def finish(self, timeout: float | None = None) -> BaseException | None:
        """Wait until the last save is written, and tell what went wrong with it. Raises NotDurableError."""
        if self._writing is None:
            return None
        seconds = _WRITE_TIMEOUT if timeout is None else timeout
        try:
            error = self._writing.exception(0 if self._late else seconds)
        except FutureTimeout:
            self._late = self._late or timeout is None
            raise NotDurableError(
                f"storage has not taken the last checkpoint within {seconds:.0f} s: see that its server is up"
            ) from None
        self._writing, self._error = None, error
        atexit.unregister(self._finish_at_exit)
        return error

    def error_of(self, stamp: ShardId) -> BaseException | None:
        """What went wrong with a save, though somebody was told before, if it is the newest that came here."""
        return self._error if self._stamp is not None and self._stamp.checkpoint == stamp.checkpoint else None

    def _finish_at_exit(self) -> None:
        if os.getpid() != self._pid:  # a forked child has no thread that writes
            return
        with suppress(NotDurableError):
            self.finish(self._at_exit)

    def close(self) -> None:
        """What is being written goes on being written. The process's end waits for it, but not for long any more."""
        self._at_exit = _AFTER_CLOSE
