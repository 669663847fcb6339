"""Reads the status pages of the other ranks on this node."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from rekindle.errors import FormatError
from rekindle.memory.job_dir import JobDir
from rekindle.memory.status import Status, StatusReader

__all__ = ["Peers"]


class Peers:
    """The other ranks of this start on this node, as their status pages show them. None where there is no memory."""

    def __init__(self, job: JobDir | None, rank: int, local_ranks: Sequence[int], generation: int) -> None:
        self._job, self._generation = job, generation
        self._ranks = [other for other in local_ranks if other != rank]
        self._pages: dict[int, StatusReader] = {}

    def live(self) -> list[Status]:
        """Returns the pages of those whose processes live."""
        trainers = self._job.trainers() if self._job is not None else {}
        return self._read([rank for rank in self._ranks if rank in trainers])

    def all(self) -> list[Status]:
        """Returns the pages of those that have ended, too."""
        return self._read(self._ranks)

    def _read(self, ranks: list[int]) -> list[Status]:
        found: list[Status] = []
        if self._job is None:
            return found
        for rank in ranks:
            with suppress(OSError, FormatError):
                if rank not in self._pages:
                    self._pages[rank] = StatusReader(self._job.paths.status_page(rank))
                page = self._pages[rank].read()
                if page.generation == self._generation:
                    found.append(page)
        return found
