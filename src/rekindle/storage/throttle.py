"""Limits how much of the machine a drain takes: bytes per second and share of the time."""

from __future__ import annotations

import math
import re
import threading
import time
from collections.abc import Callable

from rekindle.errors import UsageError
from rekindle.format.layout import PAGE

__all__ = ["Budget", "parse_size", "parse_rate", "drain_interval"]

_SLICE = 0.05
"""Seconds' worth of bytes that are written in one go under a budget, and that a late writer may catch up with. It is
too short for a disk's other users to notice, and long beside the clock's resolution."""
_TIMES = 10
"""Ratio of the time between two drains to the time that one takes. A drain takes cores and the disk from training, and
a tenth of the time is not missed. The price: a drain that takes a second longer puts ten more seconds of progress at
risk, should the node be lost."""
_UNITS = {"": 1, "k": 1000, "M": 1000**2, "G": 1000**3, "T": 1000**4}
_UNITS |= {"Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30, "Ti": 1 << 40, "K": 1000}
_AMOUNT = re.compile(r"([0-9]+(?:\.[0-9]*)?|\.[0-9]+) ?((?:[KMGT]i|[kKMGT])?)B?")


def parse_size(text: str) -> float:
    """Returns the bytes that a text such as ``"5GB"`` or ``"1.5 GiB"`` stands for; NaN for anything else."""
    match = _AMOUNT.fullmatch(text.strip())
    return float(match[1]) * _UNITS[match[2]] if match else math.nan


def parse_rate(value: str | int | float | None) -> int | None:
    """Returns the bytes per second of ``"500MB/s"``, ``"1.5GiB/s"`` or a number of bytes. None, no limit, stays None.

    Units are powers of 1000 (kB, MB, GB, TB) or of 1024 (KiB, MiB, GiB, TiB). Raises UsageError for anything else, and
    for less than one byte per second.
    """
    if value is None:
        return None
    number = math.nan
    if isinstance(value, str):
        number = parse_size(value.strip().removesuffix("/s"))
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        number = value
    if not 1 <= number < 1 << 63:
        raise UsageError(
            f"{value!r} is not a rate: give bytes per second as a number, or a text like '500MB/s' or '1.5GiB/s' "
            "(kB, MB, GB, TB or KiB, MiB, GiB, TiB), or None for no limit"
        )
    return int(number)


def drain_interval(seconds: float, took: float) -> float:
    """Returns the seconds from the start of one drain, which took ``took`` seconds, to the start of the next.

    At least ``seconds``, and enough that storage is written to for at most a tenth of the time.
    """
    return max(seconds, _TIMES * took)


class Budget:
    """A limit of bytes per second shared by all that take from it; None is no limit.

    One thread may call ``take``; any thread may call the other methods.
    """

    def __init__(
        self,
        limit: int | None = None,
        *,
        now: Callable[[], float] = time.monotonic,
        wait: Callable[[float], object] | None = None,
    ) -> None:
        """Takes another clock, ``now`` and ``wait``, for tests that must not really wait."""
        self.limit = limit
        """Bytes per second; may be changed at any moment."""
        self._due = 0.0
        self._lifted = threading.Event()
        self._now, self._wait = now, wait or self._lifted.wait

    def piece(self, most: int) -> int:
        """Returns how many bytes to write in one go: whole pages, at most ``most`` and at most a slice's worth."""
        limit = self.limit
        if limit is None or self._lifted.is_set():
            return most
        return max(PAGE, min(most, int(limit * _SLICE) // PAGE * PAGE))

    def take(self, nbytes: int) -> None:
        """Waits until ``nbytes`` more may be written: until the time of all bytes before them is over."""
        limit = self.limit
        if limit is None or self._lifted.is_set():
            return
        self._wait(max(0.0, self._due - self._now()))
        self._due = max(self._due, self._now() - _SLICE) + nbytes / limit

    def lift(self, *, on: bool = True) -> None:
        """Lifts the limit, because someone waits for the end, and wakes ``take``. ``on=False`` imposes it again."""
        if on:
            self._lifted.set()
        else:
            self._lifted.clear()
