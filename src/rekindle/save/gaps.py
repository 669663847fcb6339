"""Reports steps that have no snapshot because memory is being made: at a job's beginning, and as its state grows."""

from __future__ import annotations

import logging
import time

from rekindle.common.durations import describe_seconds

__all__ = ["Gaps"]

log = logging.getLogger("rekindle")

_PACE = 2e9
"""Bytes of memory that a quiet core makes in a second, in small pages. Huge ones take half as long, or a third."""


class Gaps:
    """Counts steps that are left out in a row. The log reports the 1st, 2nd, 4th and so on of such gaps.

    A state that keeps growing may make one after the other.
    """

    def __init__(self) -> None:
        self.left_out = 0
        """Steps left out in a row, up to now."""
        self._count = 0
        self._unprotected_since: float | None = None
        """Time at which memory for the job's first snapshot was begun; None once there is one."""

    @property
    def _is_reported(self) -> bool:
        return self._count & (self._count - 1) == 0

    def expect_first(self, nbytes: int) -> None:
        """Say for about how long a new job has no snapshot."""
        self._unprotected_since = time.monotonic()
        size = f"{nbytes / 1e9:.1f} GB" if nbytes >= 1e9 else f"{nbytes / 1e6:.0f} MB"
        log.info(
            "no snapshot until memory for %s is ready, in about %s: a fault before it loses all progress",
            *(size, describe_seconds(nbytes / _PACE)),
        )

    def leave_out(self, step: int, why: Exception) -> None:
        """Count a step that has no snapshot, and report the first in a row."""
        self._count += not self.left_out
        if not self.left_out and self._is_reported:
            log.info(
                "step %d has no snapshot, nor have those after it until memory is ready, which slows no step() down: "
                "%s",
                *(step, why),
            )
        self.left_out += 1

    def note_in_memory(self, step: int) -> None:
        """Report the job's first snapshot. ``step`` is the newest in memory; -1 while there is none."""
        if step >= 0 and self._unprotected_since is not None:
            log.info("protected from step %d on, after %.1f s", step, time.monotonic() - self._unprotected_since)
            self._unprotected_since = None

    def end(self, step: int) -> bool:
        """Note that memory takes ``step``. Returns True if that ends a gap."""
        if not self.left_out:
            return False
        if self._is_reported:
            log.info("memory is ready: step %d has a snapshot, the %d before it have none", step, self.left_out)
        self.left_out = 0
        return True

    def break_off(self) -> None:
        """Forget the steps left out: storage takes what comes."""
        self.left_out = 0
