"""Reads the status pages of the other ranks on this node, and takes the agent's word on those of other nodes."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from rekindle.errors import FormatError
from rekindle.format.fields import check_integer
from rekindle.memory.job_dir import JobDir
from rekindle.memory.status import TRAINING, Status, StatusReader

__all__ = ["Peers"]

_NOTICE, _NOTICE_AFAR = 0.2, 2.0
"""Seconds in which the live ranks of this node should have learned of a fault too, and this one of those of other nodes
that they have: agents tell it each other ten times a second, on busy nodes later."""
_POLL = 0.005


class Peers:
    """The other ranks of this start. None of this node where there is no memory."""

    def __init__(
        self, job: JobDir | None, rank: int, local_ranks: Sequence[int], generation: int, *, afar: bool = False
    ) -> None:
        """``afar``: True if there are ranks on other nodes."""
        self._job, self._generation = job, generation
        self._reached, self._all_told = -1, not afar
        """Newest step that a rank of another node has come to, an update that has begun included; True once all of them
        have been told to go. The agent says so."""
        self.misses_a_node = False
        """True while nobody hears a node that was heard before. The agent says so."""
        self._ranks = [other for other in local_ranks if other != rank]
        self._pages: dict[int, StatusReader] = {}

    def live(self) -> dict[int, Status]:
        """Returns the pages of those whose processes live, by rank."""
        trainers = self._job.trainers() if self._job is not None else {}
        return self._read([rank for rank in self._ranks if rank in trainers])

    def all(self) -> dict[int, Status]:
        """Returns the pages of those that have ended, too, by rank."""
        return self._read(self._ranks)

    def hear(self, word: dict[str, Any]) -> None:
        """Take the agent's word on the ranks of other nodes. Raises ValueError if it makes no sense."""
        self._reached = max(self._reached, check_integer(word["reached"], -1))
        self._all_told = word["told"] is True
        self.misses_a_node = word.get("misses") is True

    def are_past_afar(self, step: int) -> bool:
        """True if a rank of another node is past ``step``."""
        return self._reached > step

    def wait_until_told(self, *, afar: bool) -> None:
        """Wait until the live ranks of this node know of the fault, with ``afar`` all; for a moment at most."""
        began = time.monotonic()
        while (waited := time.monotonic() - began) < _NOTICE_AFAR:
            here = waited > _NOTICE or all(page.stage != TRAINING for page in self.live().values())
            if here and (self._all_told or not afar):
                return
            time.sleep(_POLL)

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
