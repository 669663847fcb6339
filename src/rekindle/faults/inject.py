"""Faults that a rank can only bring about itself, for a drill."""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path

from rekindle.errors import RekindleError

__all__ = ["obey"]

_CHUNK = 64 << 20
"""Bytes that a rank takes at a time."""


def obey(order: str) -> None:
    """``exception``: raise; ``hang``: never return; ``oom``: take memory until the kernel puts an end to it."""
    if order == "exception":
        raise RekindleError("a drill: this rank was told to raise")
    if order == "oom":
        with suppress(OSError):
            Path("/proc/self/oom_score_adj").write_text("1000")  # we, and nobody else, are to be killed
        hoard = []
        while True:
            hoard.append(bytearray(_CHUNK))
    while True:
        time.sleep(1.0)
