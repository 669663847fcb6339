"""Reads the status pages of the other ranks on this node, and what they have in its memory."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from rekindle.errors import FormatError
from rekindle.memory.job_dir import JobDir
from rekindle.memory.status import Status, StatusReader

__all__ = ["Peers"]


class Peers:
    """The other ranks of this start on this node, as the memory store shows them. None where there is no memory."""

    def __init__(self, job: JobDir | None, rank: int, local_ranks: Sequence[int], generation: int) -> None:
        self._job, self._generation = job, generation
        self._ranks = [other for other in local_ranks if other != rank]
        self._pages: dict[int, StatusReader] = {}

    def live(self) -> dict[int, Status]:
        """Returns the pages of those whose processes live, by rank."""
        trainers = self._job.trainers() if self._job is not None else {}
        return self._read([rank for rank in self._ranks if rank in trainers])

    def all(self) -> dict[int, Status]:
        """Returns the pages of those that have ended, too, by rank."""
        return self._read(self._ranks)

    def holding(self, step: int) -> set[int]:
        """Returns the ranks of this node that have a snapshot of ``step`` in memory.

        A page tells the newest only: a rank that has a later step need not have this one.
        """
        found = self._job.snapshots.shard_ids() if self._job is not None else ()
        return {
            stamp.rank for stamp, _ in found if stamp.step == step and stamp.incarnation.generation == self._generation
        }

    def _read(self, ranks: list[int]) -> dict[int, Status]:
        found: dict[int, Status] = {}
        if self._job is None:
            return found
        for rank in ranks:
            with suppress(OSError, FormatError):
                if rank not in self._pages:
                    self._pages[rank] = StatusReader(self._job.paths.status_page(rank))
                page = self._pages[rank].read()
                if page.generation == self._generation:
                    found[rank] = page
        return found
