"""Decides after how many seconds without progress the ranks of a node hang."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from rekindle.errors import UsageError
from rekindle.memory.status import Status

__all__ = ["FAST", "PATIENT", "SilenceLimit", "silence_floor", "silence_limit", "is_traced"]

PATIENT = 60.0
"""Seconds without progress that are never a hang by default: evaluations, checkpoints of other kinds and loaders at an
epoch's end take seconds. The price: a hang is noticed a minute later."""
FAST = 0.0
"""The floor of a job that declares its pauses: the limit then depends on recent steps alone."""

_FACTOR, _MARGIN = 3.0, 1.0
"""Silence may last this many times the longest seen before, plus this many seconds."""
_MOST_MORE = 600.0
"""Seconds by which the limit may exceed the longest pause seen. Without a bound each pause would allow one three times
as long. NCCL's own collectives give up after ten minutes, too."""


@dataclass(frozen=True)
class SilenceLimit:
    """The time that a node's ranks may go without progress."""

    seconds: float
    why: str
    """The reason for the figure, for people."""


def silence_floor(watchdog: object) -> float | None:
    """Returns the floor of ``guard(watchdog=...)`` in seconds; None for no watchdog. Raises UsageError."""
    if watchdog is True:
        return PATIENT
    if watchdog is False:
        return None
    if watchdog == "fast":
        return FAST
    if isinstance(watchdog, (int, float)) and 0 < watchdog < math.inf:
        return float(watchdog)
    raise UsageError(f'watchdog is {watchdog!r}: must be True, False, "fast" or a number of seconds above 0')


def silence_limit(floors: Iterable[float | None], pages: Iterable[Status]) -> SilenceLimit | None:
    """Returns the limit for ranks with these floors; None while it is unknown, and where a rank has no watchdog.

    Ranks wait for each other, so the longest of their limits holds for all.
    """
    asked, seen = list(floors), list(pages)
    if not asked or not all(page.longest > 0 for page in seen):
        return None  # a rank that has not timed a step yet may be compiling
    patient = [floor for floor in asked if floor is not None]
    if len(patient) < len(asked):
        return None
    longest, pause, floor = max(p.longest for p in seen), max(p.pause for p in seen), max(patient)
    limits = [SilenceLimit(_FACTOR * longest + _MARGIN, f"{_FACTOR:g} x the longest recent step + {_MARGIN:g} s")]
    if floor > FAST:
        limits.append(SilenceLimit(floor, "the floor that ckpt.guard(watchdog=SECONDS) sets"))
        learned = min(_FACTOR * pause + _MARGIN, pause + _MOST_MORE)
        limits.append(
            SilenceLimit(learned, f"what the job's longest pause so far, {pause:.1f} s, gives reason to expect")
        )
    return max(limits, key=lambda limit: limit.seconds)


def is_traced(pid: int) -> bool:
    """True if a debugger such as gdb or strace is attached to a process."""
    try:
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("TracerPid:"):
                return line.split()[1] != "0"
    except OSError:
        pass
    return False
