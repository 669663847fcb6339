"""Lowers the priority of threads that work beside training."""

from __future__ import annotations

import os
import sys
import threading
from contextlib import suppress

__all__ = ["lower_priority"]

_NICENESS = 10
"""Niceness of a background thread, so that it takes the cores that training leaves. The kernel also derives the
thread's I/O priority from it, unless that is set."""


def lower_priority(niceness: int = _NICENESS) -> None:
    """Lowers the priority of this thread and of those that it starts. Never fails; has an effect on Linux only."""
    if hasattr(os, "setpriority") and sys.platform.startswith("linux"):  # elsewhere it would slow the whole process
        with suppress(OSError):
            thread = threading.get_native_id()
            os.setpriority(os.PRIO_PROCESS, thread, max(niceness, os.getpriority(os.PRIO_PROCESS, thread)))
