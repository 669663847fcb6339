"""Page locks of a device that minds when they are dropped."""

from __future__ import annotations

import ctypes
import threading
import weakref
from pathlib import Path

__all__ = ["Lock"]


def mapped(address: int) -> bool:
    spans = (line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines())
    return any(int(start, 16) <= address < int(stop, 16) for start, stop in spans)


class Lock:
    """A page lock of a device that minds: it must be dropped before its memory is unmapped."""

    alive: weakref.WeakSet[Lock] = weakref.WeakSet()
    late: list[Lock] = []
    """Those whose memory was unmapped before them."""
    dropped_by: list[str] = []
    """Names of the threads that dropped one."""

    def __init__(self, view: ctypes.Array[ctypes.c_char], start: int, stop: int) -> None:
        self.anchor = ctypes.c_char.from_buffer(view, start)
        self.range, self.thread = (start, stop), threading.current_thread().name
        self.alive.add(self)

    def __del__(self) -> None:
        self.dropped_by.append(threading.current_thread().name)
        if not mapped(ctypes.addressof(self.anchor)):
            self.late.append(self)
