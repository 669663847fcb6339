"""Defines a lock that refuses its own thread, which would wait for itself for ever."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from rekindle.errors import MemoryStoreError

__all__ = ["Exclusive"]


class Exclusive:
    """Lets one thread in at a time."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._inside = False

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Waits for the turn of this thread.

        Raises MemoryStoreError in a thread that is inside already: in its signal handler, which interrupts a save.
        """
        with self._lock:
            if self._inside:
                raise MemoryStoreError(
                    "this thread is just saving another file into memory, which its signal handler has interrupted: "
                    "let the handler only take a note, and save after it"
                )
            self._inside = True
            try:
                yield
            finally:
                self._inside = False
