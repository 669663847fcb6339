"""Brings about faults that only the rank itself can cause, for a drill."""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path

from rekindle.errors import RekindleError

__all__ = ["inject_fault"]

_CHUNK = 64 << 20
"""Bytes that a rank takes at a time."""


def inject_fault(kind: str) -> None:
    """Fail by ``exception``: raise; ``hang``: never return; ``oom``: take memory until the kernel ends the process."""
    if kind == "exception":
        raise RekindleError("a drill: this rank was told to raise")
    if kind == "oom":
        with suppress(OSError):
            Path("/proc/self/oom_score_adj").write_text("1000")  # the kernel is to kill this process, and no other
        taken = []
        while True:
            taken.append(bytearray(_CHUNK))
    while True:
        time.sleep(1.0)
