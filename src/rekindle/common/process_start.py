"""Tells when this process was started, by which clock, and if it was forked warm."""

from __future__ import annotations

import os
import socket
import time
from contextlib import suppress
from pathlib import Path

__all__ = ["clock_id", "mark_warm", "process_started", "was_warm"]

_STARTED = 19
"""Field of /proc/self/stat, counted from the state on: clock ticks since the boot."""

_warm = False


def mark_warm() -> None:
    """Note that this process was forked from one that had loaded what the script imports."""
    global _warm
    _warm = True


def was_warm() -> bool:
    """True if ``mark_warm`` was called in this process."""
    return _warm


def process_started() -> float | None:
    """Returns when this process was started or forked, by this host's monotonic clock; None where that isn't known.

    The kernel counts in ticks of 10 ms as a rule, and from the boot on, with the time that the host slept.
    """
    with suppress(OSError, ValueError, IndexError, AttributeError):
        ticks = int(Path("/proc/self/stat").read_bytes().rpartition(b")")[2].split()[_STARTED])
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
        return time.monotonic() - age
    return None


def clock_id() -> str:
    """Names the monotonic clock that this host's processes share: it begins anew with each boot."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        boot = ""
    return f"{socket.gethostname()} {boot}"
