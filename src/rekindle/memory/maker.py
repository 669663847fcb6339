"""Makes and drops the memory of slots in the background, so that no ``step()`` waits for that."""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass, field

from rekindle.common.numa import run_near
from rekindle.common.os_errors import describe_error
from rekindle.common.priority import lower_priority
from rekindle.errors import MemoryStoreError
from rekindle.memory.pages import PageLock
from rekindle.memory.slot import Slot

__all__ = ["SlotMaker"]


@dataclass(eq=False)
class _Job:
    """The making of one slot's memory; with no ``nbytes`` its end."""

    slot: Slot
    nbytes: int | None
    stopped: bool = False
    """True once it is to be broken off."""
    ended: threading.Event = field(default_factory=threading.Event)
    error: MemoryStoreError | None = None


class SlotMaker:
    """Makes the memory of slots, one after the other, in one thread of low priority.

    The thread exists while there is work. While ``busy_with`` is True of a slot, nobody else may use that slot's
    mapping or its file's contents. For one thread at a time, except ``wait``.
    """

    def __init__(self, page_lock: PageLock | None, numa_node: int | None = None) -> None:
        """``numa_node``: the one that the memory is best taken from; None for any."""
        self._page_lock, self._numa_node = page_lock, numa_node
        self._jobs: dict[Slot, _Job] = {}
        """Jobs whose result nobody has asked for yet."""
        self._queue: deque[_Job] = deque()
        self._lock = threading.Lock()
        self._running = False
        self._idle = threading.Event()
        self._idle.set()

    def make(self, slot: Slot, nbytes: int) -> None:
        """Begins to make the memory for ``nbytes``. The slot's file is unlocked when that has ended."""
        self._jobs[slot] = job = _Job(slot, nbytes)
        self._begin(job)

    def drop(self, slot: Slot) -> None:
        """Closes a slot whose file has been removed: its pages are given back as its last mapping goes."""
        self._jobs.pop(slot, None)
        self._begin(_Job(slot, None))

    def _begin(self, job: _Job) -> None:
        with self._lock:
            self._queue.append(job)
            self._idle.clear()
            if self._running:
                return
            self._running = True
        try:
            threading.Thread(target=self._run, name="rekindle-memory", daemon=True).start()
        except RuntimeError as error:  # too many threads, or the interpreter is about to end
            self._end_all(error)

    def _end_all(self, error: RuntimeError) -> None:
        """Ends all jobs, for which no thread can be had: memory is not made, but what is to go goes."""
        with self._lock:
            jobs, self._running = list(self._queue), False
            self._queue.clear()
            self._idle.set()
        for job in jobs:
            job.stopped, job.error = True, MemoryStoreError(f"memory for snapshots is not made: {error}")
            self._do(job)

    def _run(self) -> None:
        lower_priority()
        run_near(self._numa_node)
        while True:
            with self._lock:
                if not self._queue:
                    self._running = False
                    self._idle.set()
                    return
                job = self._queue.popleft()
            self._do(job)
            del job  # else the thread would keep a mapping that nobody uses any more

    def _do(self, job: _Job) -> None:
        try:
            if job.nbytes is None:
                job.slot.close()
            elif not job.stopped:
                job.slot.make(job.nbytes, self._page_lock, lambda: not job.stopped)
        except MemoryStoreError as error:
            job.error = error
        except Exception as error:  # else the thread would end, and no memory would ever be made again
            what = f"{type(error).__name__}: {describe_error(error)}"
            job.error = MemoryStoreError(f"memory store {job.slot.path.parent}: making memory failed: {what}")
        finally:
            if job.nbytes is not None:
                job.slot.unlock()
            job.ended.set()

    def busy_with(self, slot: Slot) -> bool:
        """True while the slot's memory is being made."""
        job = self._jobs.get(slot)
        return job is not None and not job.ended.is_set()

    def error_of(self, slot: Slot) -> MemoryStoreError | None:
        """Returns, once, the reason why the slot's memory could not be made."""
        job = self._jobs.get(slot)
        return self._jobs.pop(slot).error if job is not None and job.ended.is_set() else None

    def recall(self, slot: Slot, timeout: float) -> bool:
        """Breaks off the making of the slot's memory: what is left can be made by the caller, at its own priority.

        Returns False if the thread has not let go of the slot within ``timeout`` seconds.
        """
        job = self._jobs.get(slot)
        if job is not None:
            job.stopped = True
            with self._lock:
                if job in self._queue:
                    self._queue.remove(job)
                    job.ended.set()
            if not job.ended.wait(timeout):
                return False
            del self._jobs[slot]
        return True

    def wait(self, timeout: float) -> bool:
        """Waits until there is nothing left to do. Returns False after ``timeout`` seconds."""
        return self._idle.wait(timeout)
