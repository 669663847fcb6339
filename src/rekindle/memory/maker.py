"""Makes, cuts and drops the memory of slots in the background, so that no ``step()`` waits for that."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from rekindle.common.flag import Flag
from rekindle.common.numa import run_near
from rekindle.common.os_errors import describe_error
from rekindle.errors import MemoryStoreError
from rekindle.memory.pages import PageLock
from rekindle.memory.slot import Slot

__all__ = ["SlotMaker"]


@dataclass(eq=False)
class _Job:
    """Work on the memory of one slot."""

    slot: Slot
    work: Callable[[Callable[[], bool]], object]
    """Ends early once the callable that it is given returns False."""
    makes: bool = False
    """True if the slot can't be written to before it is done."""
    stopped: bool = False
    """True once it is to be broken off."""
    ended: Flag = field(default_factory=Flag)
    error: MemoryStoreError | None = None


class SlotMaker:
    """Makes the memory of slots, one after the other, in a thread and its helpers of training's own priority.

    At a lower one it would cost training as much in all, and leave the job without a snapshot for as long as the cores
    are busy. The thread exists while there is work. While ``makes`` is True of a slot, nobody else may use that slot's
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
        self._idle = Flag()
        self._idle.set()

    def make(self, slot: Slot, nbytes: int, extra: int = 0) -> None:
        """Begins to make the memory for ``nbytes``, and ``extra`` bytes more if there is room for all of them.

        The slot's file is unlocked when that has ended.
        """
        self._jobs[slot] = job = _Job(slot, partial(slot.make, nbytes, self._page_lock, extra=extra), makes=True)
        self._begin(job)

    def trim(self, slot: Slot, nbytes: int) -> None:
        """Begins to give back what a slot has beyond ``nbytes``, which may be written and committed meanwhile.

        Its file is too long until that has ended. ``recall`` it before more than ``nbytes`` are written.
        """
        self._jobs[slot] = job = _Job(slot, partial(slot.trim, nbytes))
        self._begin(job)

    def drop(self, slot: Slot) -> None:
        """Closes a slot whose file has been removed: its pages are given back as its last mapping goes."""
        self._jobs.pop(slot, None)
        self._begin(_Job(slot, lambda go_on: slot.close()))

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
            if job.makes:
                job.stopped, job.error = True, MemoryStoreError(f"memory for snapshots is not made: {error}")
            self._do(job)

    def _run(self) -> None:
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
            if not job.stopped:
                job.work(lambda: not job.stopped)
        except MemoryStoreError as error:
            job.error = error
        except Exception as error:  # else the thread would end, and no memory would ever be made again
            what = f"{type(error).__name__}: {describe_error(error)}"
            job.error = MemoryStoreError(f"memory store {job.slot.path.parent}: making memory failed: {what}")
        finally:
            if job.makes:
                job.slot.unlock()
            job.ended.set()

    def busy_with(self, slot: Slot) -> bool:
        """True while the slot's memory is being made or cut."""
        job = self._jobs.get(slot)
        return job is not None and not job.ended.is_set()

    def makes(self, slot: Slot) -> bool:
        """True while the slot's memory is being made."""
        return self.busy_with(slot) and self._jobs[slot].makes

    def error_of(self, slot: Slot) -> MemoryStoreError | None:
        """Returns, once, the reason why the slot's memory could not be made."""
        job = self._jobs.get(slot)
        return self._jobs.pop(slot).error if job is not None and job.ended.is_set() else None

    def recall(self, slot: Slot, timeout: float) -> bool:
        """Breaks off the work on a slot's memory: what is left to make can be made by the caller, at its own priority.

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
