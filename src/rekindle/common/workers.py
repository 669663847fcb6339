"""Runs work in threads that the end of the process waits for only as long as they get on."""

from __future__ import annotations

import atexit
import os
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue

__all__ = ["Workers", "ending"]

_GRACE = 5.0
"""Seconds from the end of the process after which work that waits for something gives up."""
_LONGEST = 600.0
"""Seconds that the end of the process waits for work that doesn't wait for anything, such as a copy."""

ending = threading.Event()
"""Set when the process is about to end and has waited ``_GRACE`` seconds: who waits in a worker is to give up."""

_Todo = SimpleQueue["tuple[Future[object], Callable[[], object]] | None"]


class Workers:
    """At most ``count`` daemon threads, started when they are needed, that take work in order. Thread-safe.

    A pool of ``concurrent.futures`` would keep a process from ending that has failed while a device is stuck.
    """

    def __init__(self, count: int, name: str) -> None:
        self._count, self._name = count, name
        self._todo: _Todo = SimpleQueue()
        self._idle = threading.Semaphore(0)
        """Counts threads that have nothing to do."""
        self._threads: list[threading.Thread] = []
        self._starting = threading.Lock()
        self._closed = False
        weakref.finalize(self, _end, self._todo, self._threads).atexit = False
        _open.add(self)

    def submit(self, work: Callable[[], object]) -> Future[object]:
        """Has a thread do ``work``, after all that was submitted before. Returns its future.

        Raises RuntimeError after ``close``, and at the end of the process.
        """
        if self._closed:
            raise RuntimeError(f"{self._name}: no work is taken after the end")
        future: Future[object] = Future()
        self._todo.put((future, work))
        if not self._idle.acquire(blocking=False):
            with self._starting:
                self._start()
        return future

    def _start(self) -> None:
        number = len(self._threads)
        if number == self._count:
            return
        thread = threading.Thread(
            target=_work, args=(self._todo, self._idle), name=f"{self._name}-{number}", daemon=True
        )
        try:
            thread.start()
        except RuntimeError:  # the interpreter ends, and starts no more threads
            if not number:
                raise
        else:
            self._threads.append(thread)

    def close(self, timeout: float | None = None) -> None:
        """Ends the threads once they have done everything. Waits for that, for at most ``timeout`` seconds."""
        self._closed = True
        _end(self._todo, self._threads)
        until = None if timeout is None else time.monotonic() + timeout
        for thread in self._threads:
            thread.join(None if until is None else max(0.0, until - time.monotonic()))

    @property
    def busy(self) -> bool:
        """True if a thread has not ended."""
        return any(thread.is_alive() for thread in self._threads)


def _work(todo: _Todo, idle: threading.Semaphore) -> None:
    while (task := todo.get()) is not None:
        future, work = task
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)
        del task, future, work  # while nothing is to do, nothing is kept alive
        idle.release()


def _end(todo: _Todo, threads: list[threading.Thread]) -> None:
    for _ in threads:
        todo.put(None)


_open: weakref.WeakSet[Workers] = weakref.WeakSet()
_pid = os.getpid()


def _finish() -> None:
    workers = list(_open) if os.getpid() == _pid else []  # a forked child has no such threads
    for one in workers:
        one.close(_GRACE)
    if any(one.busy for one in workers):
        ending.set()
        for one in workers:
            one.close(_LONGEST)


atexit.register(_finish)
