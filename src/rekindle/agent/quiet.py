"""Spares an agent the rounds of work that would find nothing to do: they take time from training."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from rekindle.memory.asking import Asking
from rekindle.memory.job_dir import JobDir
from rekindle.memory.mark import Mark, mark_of

__all__ = ["Quiet"]

_LONGEST = 0.5
"""Seconds after which a round of work follows whatever the signs say."""


class Quiet:
    """Detects whether anything has happened to a job that a round of work could be for. For one thread at a time.

    A round reads locks, receipts and the job's description in another thread. A look at the signs reads the times of
    two files. The end of a rank without a guard has no sign: the next round sees it.
    """

    def __init__(self, job: JobDir, faults: Callable[[], object]) -> None:
        """``faults`` returns what changes when a guarded rank begins, ends or fails."""
        self._job, self._asking, self._faults = job, Asking(job.paths), faults
        self._round_at = self._until = -math.inf
        self._signs: object = None
        self._snapshots: list[Mark] | None = None
        """Signs of the snapshots that the last round has seen; None if it was too early for any."""

    def begin_round(self) -> None:
        """Note the signs before a round of work looks."""
        self._round_at, self._until = time.monotonic(), -math.inf
        self._signs, self._snapshots = self._read_signs(), self._read_snapshots()

    def rest(self, due_at: float) -> None:
        """Be quiet, as the round has found nothing to do. New snapshots count from ``due_at`` on (``next_due``)."""
        self._until = time.monotonic() + _LONGEST
        if due_at > self._round_at:
            self._until, self._snapshots = min(self._until, due_at), None

    @property
    def lasts(self) -> bool:
        """True while nothing has happened."""
        if time.monotonic() >= self._until or self._read_signs() != self._signs:
            return False
        return self._snapshots is None or self._read_snapshots() == self._snapshots

    def _read_signs(self) -> object:
        return self._asking.mark(), mark_of(self._job.paths.job), self._faults()

    def _read_snapshots(self) -> list[Mark]:
        return [mark_of(directory) for directory in self._job.snapshots.step_dirs()]
