"""Counts the faults of a job by what it had to go back to, from the records of its incidents. Pure functions."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rekindle.memory.incident import SECURED, Incident

__all__ = ["ASSUMED", "History", "history_of"]

ASSUMED = 86400.0
"""Seconds before the first record in which one fault more is taken to have struck. Without it, a job that had no fault
yet would never be saved, and one that had its first after an hour would be taken to have one each hour."""
_STORAGE = "storage"
"""Place of an incident whose job went on from storage."""


@dataclass(frozen=True)
class History:
    """Describes the past of a job."""

    seconds: float
    """Time for which it ran, as far as it is known."""
    faults: int
    """Starts that a fault has ended, each counted once for all hosts."""
    to_snapshots: int
    """Of them those after which the newest snapshot decided what was lost: the ranks had not secured a newer step."""
    to_storage: int
    """Of them those after which the newest checkpoint on storage decided that: memory had none."""
    outage: float
    """Mean seconds from a fault to the first new step; 0 if none is known."""

    def between(self, faults: int) -> float:
        """Returns the mean seconds between two faults of a kind of which there were so many, by a cautious estimate."""
        return (self.seconds + ASSUMED) / (faults + 1)


def history_of(records: Iterable[Incident]) -> History:
    """Returns what the records of all hosts tell. A job that trains has one of its stretch up to now among them."""
    starts: dict[str, list[Incident]] = {}
    for record in records:
        starts.setdefault(record.start, []).append(record)
    struck = [each for each in starts.values() if any(record.is_fault for record in each)]
    outages = [max(known) for each in struck if (known := [one.outage for one in each if one.outage is not None])]
    stored = [any(one.place == _STORAGE for one in each) for each in struck]
    secured = [_is_secured(each) for each in struck]
    return History(
        seconds=sum(max(one.seconds or 0.0 for one in each) for each in starts.values()),
        faults=len(struck),
        to_snapshots=sum(not safe and not far for safe, far in zip(secured, stored, strict=True)),
        to_storage=sum(stored),
        outage=statistics.fmean(outages) if outages else 0.0,
    )


def _is_secured(hosts: Sequence[Incident]) -> bool:
    """True if the survivors of a fault secured the step that they were at, so that no earlier snapshot counted."""
    return all(SECURED in one.moments and one.lost is not None and one.lost <= 1 for one in hosts)
