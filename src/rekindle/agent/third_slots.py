"""Has each rank make a third slot before a drain takes one of two from it."""

from __future__ import annotations

import time
from contextlib import suppress

from rekindle.memory.job import JobInfo
from rekindle.memory.job_dir import JobDir
from rekindle.memory.pages import AT_ONCE
from rekindle.memory.thirds import Thirds

__all__ = ["ThirdSlots"]

_WAITS = 5.0
"""Seconds that a drain waits at most. A rank makes a slot at the end of a step, and steps may be long."""


class ThirdSlots:
    """Looks whether a drain costs steps their snapshots.

    While a drain reads a rank's older snapshot, the newest has to stay: with two slots only, steps have no snapshot
    until the third one is made. So it is made first. What there is of slots is seen from their files.
    """

    def __init__(self, job: JobDir) -> None:
        self._job, self._notes = job, Thirds(job.paths)
        self._since: float | None = None
        """When they were asked for; None while nothing waits."""

    @property
    def awaited(self) -> bool:
        """True while a drain waits for them."""
        return self._since is not None

    def ready(self, info: JobInfo) -> bool:
        """Returns True if a drain may begin: nobody lacks a slot, makes one, or has the time for it left."""
        if not self._are_coming(info):
            waited, self._since = self._since is not None, None
            return not waited  # the next look comes when their pages are locked, too
        if self._since is None:
            self._since = time.monotonic()
            with suppress(OSError):
                self._notes.ask()
        return time.monotonic() - self._since >= _WAITS

    def _are_coming(self, info: JobInfo) -> bool:
        """Returns True if a rank that trains here has no third slot, and will make one."""
        trained = self._job.trainers()
        return any(self._lacks(rank) for rank in trained) and self._notes.are_made(info.start)

    def _lacks(self, rank: int) -> bool:
        """Returns True if a rank has fewer than three slots with all their memory. A small one is made at once."""
        sizes, there = [], 0
        for path in self._job.snapshots.rank_files(rank):
            with suppress(OSError):  # it was renamed just now: it counts the next time
                found = path.stat()
                sizes.append(found.st_size)
                there += 0 < found.st_size <= found.st_blocks * 512
        return max(sizes, default=0) > AT_ONCE and there < 3
