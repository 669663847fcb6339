"""Holds up the thread that makes memory, as a machine does that is slow or large."""

from __future__ import annotations

import threading

from rekindle.memory import pages


class Gate:
    """Stands before each piece of memory that the background thread is about to make."""

    def __init__(self) -> None:
        self.open, self.asked = threading.Event(), threading.Event()
        self._allocate = pages.allocate

    def allocate(self, fd: int, start: int, nbytes: int) -> None:
        if threading.current_thread().name == "rekindle-memory":
            self.asked.set()
            assert self.open.wait(60.0)
        self._allocate(fd, start, nbytes)
