"""Defines a flag that threads wait for, and that an interrupt can't leave locked."""

from __future__ import annotations

import threading
from collections import deque
from contextlib import suppress

__all__ = ["Flag"]


class Flag:
    """Does what ``threading.Event`` does, without a lock. Thread-safe.

    An event takes a lock in Python code. An exception that a signal's handler raises there, as Ctrl-C does, leaves it
    locked, and whoever uses the event next waits for ever.
    """

    def __init__(self) -> None:
        self._set = False
        self._bells: deque[threading.Lock] = deque()
        """One for each thread that waits, which releases it. Those that interrupts left over are rung in vain."""

    def is_set(self) -> bool:
        return self._set

    def set(self) -> None:
        """Sets the flag, and wakes all who wait for it."""
        self._set = True  # before the bells are rung: who comes later looks at it once its own bell is among them
        for bell in list(self._bells):
            with suppress(RuntimeError):  # another thread has rung it
                bell.release()

    def clear(self) -> None:
        """Lets later waits wait again."""
        self._set = False

    def wait(self, timeout: float | None = None) -> bool:
        """Waits until the flag is set, for at most ``timeout`` seconds. Returns False if it isn't."""
        if self._set:
            return True
        bell = threading.Lock()
        bell.acquire()
        self._bells.append(bell)
        if not self._set:
            bell.acquire(timeout=-1 if timeout is None else max(0.0, timeout))
        with suppress(ValueError):
            self._bells.remove(bell)
        return self._set
