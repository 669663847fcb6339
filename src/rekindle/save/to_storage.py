"""Saves the live state straight to storage, where there is no memory store, or none that works."""

from __future__ import annotations

import atexit
import logging
import mmap
import os
import time
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import suppress

from rekindle.common.priority import lower_priority
from rekindle.common.timeouts import in_background
from rekindle.errors import NotDurableError
from rekindle.format.claim import Starts
from rekindle.format.lineage import ShardId
from rekindle.format.receipt import Receipt
from rekindle.memory.job_dir import JobDir
from rekindle.save.live import Live
from rekindle.save.pending import PendingSnapshot
from rekindle.save.plan import CopyPlan
from rekindle.storage.checks import describe_recreated_root
from rekindle.storage.commit import Committer, SupersededError
from rekindle.storage.store import Store

__all__ = ["DirectSaver"]

log = logging.getLogger("rekindle")

_WRITE_TIMEOUT = 1800.0
"""Seconds that a save waits for the one before it to reach storage. A store that takes so long hangs."""
_AFTER_CLOSE = 10.0
"""Seconds that the end of a process waits for a save that ``close()`` has waited for in vain."""


class DirectSaver:
    """Copies the state into private memory; a thread writes it to storage while training goes on.

    Each save waits for the one before it, so that all ranks save the same steps without having to talk. For the thread
    that trains, but for the methods that say otherwise.
    """

    def __init__(
        self,
        live: Live,
        store: Store,
        keep: tuple[int | None, int | None],
        job: JobDir | None = None,
        starts: Callable[[], Starts | None] = lambda: None,
    ) -> None:
        """``keep``, ``job`` and ``starts`` are for ``Committer``: the retention, where to note what is on storage, and
        whose claim of the root it writes by."""
        self._live = live
        self._store = store
        self._keep = keep
        self._committer = Committer(store, job, starts)
        """Remembers from save to save what storage has shown."""
        self._buffer: mmap.mmap | None = None
        self._cache: object = None
        """State of the copy into that buffer, for the next one."""
        self._writing: Future[None] | None = None
        self._late = False
        """True if a save has been waited for in vain: the next ones don't wait, and are not made while it hangs."""
        self._stamp: ShardId | None = None
        """Shard of the newest save."""
        self._error: BaseException | None = None
        """Error of the newest save, once ``finish`` has seen it."""
        self._began = 0.0
        """Time at which the newest write began."""
        self._took: float | None = 0.0
        """Seconds that it took; None while it goes on."""
        self._at_exit = _WRITE_TIMEOUT
        self._pid = os.getpid()

    def save(self, stamp: ShardId) -> int:
        """Copies the state, and starts writing it in the background. Returns bytes. Call ``finish`` first."""
        plan, values = self._live.take(stamp)
        buffer = self._buffer_for(plan)
        self._cache, checksums = self._live.writer.write(plan, buffer, self._cache, stamp.step)
        self._submit(stamp, Receipt.encode(stamp, plan.static, checksums, values), buffer)
        return plan.layout.file_bytes

    def _buffer_for(self, plan: CopyPlan) -> mmap.mmap:
        if self._buffer is None or len(self._buffer) != plan.layout.file_bytes:
            self._cache, self._buffer = None, mmap.mmap(-1, plan.layout.file_bytes)
        return self._buffer

    def gasp(self, stamp: ShardId, *, whole: bool) -> None:
        """Brings the state, which is that of ``stamp``, to storage, and waits for that.

        ``whole`` writes all that this rank holds, else only its share. For any thread, while nothing changes the state.
        Raises OSError when storage refuses it, RekindleError when the state can't be had.
        """
        self.finish()
        self.save_noted(stamp, whole=whole)
        error = self.finish()
        if error is not None:
            raise error

    def save_noted(self, stamp: ShardId, *, whole: bool) -> None:
        """Saves a step whose end ``Live`` has noted before, as ``save`` does. Call ``finish`` first.

        Raises RekindleError when its state can't be had any more.
        """
        plan = self._live.plan(stamp, whole=whole)
        buffer = self._buffer_for(plan)
        self._submit(stamp, self._live.write(stamp, plan, buffer), buffer)

    def rescue(self, snapshot: PendingSnapshot) -> None:
        """Writes a snapshot that is whole but could not be committed to memory.

        Call ``finish`` first, and again before the next save into memory, which reuses its file.
        """
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
        """Commits this rank's shard. The last of the ranks to come here makes the checkpoint durable."""
        stamp, committer = receipt.stamp, self._committer
        try:
            newest = committer.begin(stamp)
            if newest is None and committer.root_deleted():
                log.warning("%s", describe_recreated_root(self._store.root, stamp.step))
            committer.write(receipt, data)
            if committer.commit(stamp, [stamp]):
                committer.tidy(stamp, *self._keep)
        except SupersededError as error:
            log.debug("%s", error)  # no failure: the newer one holds more of the training

    def took(self) -> float:
        """Returns the seconds that the newest write took, or has taken so far."""
        took = self._took
        return time.monotonic() - self._began if took is None else took

    @property
    def over(self) -> bool:
        """True if the newest save has ended, so that ``finish`` does not wait."""
        return self._writing is not None and self._writing.done()

    @property
    def writing(self) -> bool:
        """True from the beginning of a save until ``finish`` has seen its end."""
        return self._writing is not None

    def finish(self, timeout: float | None = None) -> BaseException | None:
        """Waits until the newest save is written. Returns its error, or None if it succeeded.

        Raises NotDurableError if it takes longer than ``timeout`` seconds.
        """
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
        """Returns the error of a save, even if ``finish`` has returned it before, if that save is the newest one."""
        return self._error if self._stamp is not None and self._stamp.checkpoint == stamp.checkpoint else None

    def _finish_at_exit(self) -> None:
        if os.getpid() != self._pid:  # a forked child has no thread that writes
            return
        with suppress(NotDurableError):
            self.finish(self._at_exit)

    def close(self) -> None:
        """Shortens the wait of the process's end for a save that is still being written. The save goes on."""
        self._at_exit = _AFTER_CLOSE
