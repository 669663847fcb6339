"""Ends the process at the deadline of a fault, in a thread made before: the fault may be that none can be had."""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from contextlib import suppress
from typing import NoReturn

__all__ = ["FLUSH", "Deadline"]

log = logging.getLogger("rekindle")

FLUSH = 0.2
"""Seconds that the streams and log handlers get to write out what they hold, before the process ends."""


class Deadline:
    """Sleeps until there is a fault. Thread-safe."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._end: float | None = None
        """Time at which the process ends, by the monotonic clock; None if nothing is to end it."""
        self._code = 0
        self._closed = False
        threading.Thread(target=self._run, name="rekindle-deadline", daemon=True).start()

    def set(self, end: float, code: int) -> None:
        """See to it that the process ends at ``end`` with the exit code ``code``, whatever hangs."""
        with self._changed:
            self._end, self._code = end, code
            self._changed.notify()

    def close(self) -> None:
        """Let the process live, and end the thread."""
        with self._changed:
            self._closed = True
            self._changed.notify()

    def end_now(self, code: int) -> NoReturn:
        """End the process at once, except that streams and log handlers may write out what they hold.

        A stuck thread may hold a stream's lock.
        """
        self.set(time.monotonic() + FLUSH, code)
        _flush()
        os._exit(code)

    def _run(self) -> None:
        with self._changed:
            while not self._closed:
                left = None if self._end is None else self._end - time.monotonic()
                if left is not None and left <= 0:
                    os._exit(self._code)
                self._changed.wait(left)


def _flush() -> None:
    for handler in log.handlers + logging.getLogger().handlers:
        with suppress(Exception):
            handler.flush()
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()
