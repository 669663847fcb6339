"""Tells ``rekindle run`` of the files that this process saves: they are the progress of a job without steps."""

from __future__ import annotations

import json
import math
import os
import time
from contextlib import suppress
from pathlib import Path

from rekindle.common.environ import LAUNCH
from rekindle.files.settings import current_settings

__all__ = ["SAVED", "tell_of_saved"]

SAVED = ".saved"
"""Ending of a process's file in the launcher's directory. Each line has a time, a path or URL, and the memory store."""
_AGAIN = 60.0
"""Seconds after which a path is told of again: a job that overwrites one all the time leaves a line a minute."""
_MOST = 10_000
"""Paths that are remembered as told."""

_told: dict[str, float] = {}
"""Monotonic time at which each path was told of last. One, as a process has one launcher."""


def tell_of_saved(target: str) -> None:
    """Tells the launcher, if ``rekindle run`` is it, of a file that was saved: a line, some 35 microseconds."""
    place, now = os.environ.get(LAUNCH), time.monotonic()
    if not place or now - _told.get(target, -math.inf) < _AGAIN:
        return
    if len(_told) >= _MOST:
        _told.clear()
    _told[target] = now
    line = json.dumps([time.time(), target, str(current_settings().base)])
    with suppress(OSError), open(Path(place) / f"{os.getpid()}{SAVED}", "a", encoding="ascii") as file:
        file.write(f"{line}\n")
