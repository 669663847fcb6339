"""Lets an earlier trainer of this process go when a later one wants its place, as when a notebook's cell runs again."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Protocol

__all__ = ["GIVE_WAY", "make_way", "occupy"]

GIVE_WAY = 10.0
"""Seconds that a save without memory gets to reach storage before a later trainer begins behind it."""


class Occupant(Protocol):
    """Trains a rank of a job in this process."""

    def give_way(self) -> str | None:
        """Let go of the place for good, without waiting for storage. Gives a reason if that can't be now."""


_occupants: dict[tuple[Path, int], weakref.ref[Occupant]] = {}
"""By directory of the job and rank: a process can't be two trainers of one rank."""


def occupy(job: Path, rank: int, occupant: Occupant) -> None:
    """Note who trains ``rank`` of the job in ``job``. It is held weakly, and may have let go when it is asked to."""
    _occupants[job, rank] = weakref.ref(occupant)


def make_way(job: Path, rank: int) -> str | None:
    """Ask whoever has that place in this process to give way. Gives the reason if it can't."""
    known = _occupants.get((job, rank))
    occupant = known() if known is not None else None
    return occupant.give_way() if occupant is not None else None
