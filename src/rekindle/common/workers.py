"""Runs work in threads that the end of the process waits for only as long as they get on."""

from __future__ import annotations

import atexit
import os
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from queue import Empty, SimpleQueue

__all__ = ["Workers", "ending"]

_LONGEST = 600.0
"""Seconds that the end of the process waits for work, such as the copy of a large state."""

_Todo = SimpleQueue["tuple[Future[object], Callable[[], object]] | None"]
_Idle = SimpleQueue[None]


class Workers:
    """At most ``count`` daemon threads, started when they are needed, that take work in order. Thread-safe.

    The end of the process waits for them. Work that may have to wait for long asks ``ending`` meanwhile, and gives up.
    The pools of ``concurrent.futures`` end before a process can be seen to end.
    """

    def __init__(self, count: int, name: str) -> None:
        self._count, self._name = count, name
        self._todo: _Todo = SimpleQueue()
        self._idle: _Idle = SimpleQueue()
        """An entry for each thread that has nothing to do. An interrupt can't leave such a queue locked."""
        self._threads: list[threading.Thread] = []
        self._starting = threading.Lock()
        self._closed = False
        self._pid = os.getpid()
        weakref.finalize(self, self._todo.put, None).atexit = False
        _open.add(self)

    def submit(self, work: Callable[[], object]) -> Future[object]:
        """Has a thread do ``work``, after all that was submitted before. Returns its future.

        Raises RuntimeError after ``close``, and at the end of the process.
        """
        if self._closed:
            raise RuntimeError(f"{self._name}: no work is taken after the end")
        future: Future[object] = Future()
        self._todo.put((future, work))
        try:
            self._idle.get_nowait()
        except Empty:
            with self._starting:
                self._start()
        return future

    def _start(self) -> None:
        self._threads = [thread for thread in self._threads if thread.ident is not None]  # one may not have started
        number = len(self._threads)
        if number == self._count:
            return
        thread = threading.Thread(
            target=_work, args=(self._todo, self._idle), name=f"{self._name}-{number}", daemon=True
        )
        self._threads.append(thread)  # first, for an interrupt may come before it runs, or after
        try:
            thread.start()
        except RuntimeError:  # the interpreter ends, and starts no more threads
            self._threads.remove(thread)
            if not number:
                raise

    def close(self, timeout: float | None = None) -> None:
        """Ends the threads once they have done everything. Waits for that, for at most ``timeout`` seconds."""
        self._closed = True
        self._todo.put(None)
        until = None if timeout is None else time.monotonic() + timeout
        for thread in self._threads:
            if thread.is_alive():  # else it may never have started
                thread.join(None if until is None else max(0.0, until - time.monotonic()))

    def finish(self) -> None:
        """Ends the threads at the end of the process. A forked child has none of its parent's."""
        if os.getpid() == self._pid:
            self.close(_LONGEST)


def ending() -> bool:
    """Returns True once the main thread has ended, so that the process does as soon as nothing keeps it."""
    return not threading.main_thread().is_alive()


def _work(todo: _Todo, idle: _Idle) -> None:
    while (task := todo.get()) is not None:
        future, work = task
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)
        del task, future, work  # while nothing is to do, nothing is kept alive
        idle.put(None)
    todo.put(None)  # the next thread ends too, however many there are


_open: weakref.WeakSet[Workers] = weakref.WeakSet()


def _finish() -> None:
    for workers in list(_open):
        workers.finish()


atexit.register(_finish)
