"""Computes what incidents have cost: outages, steps computed again, and goodput. Pure functions of records.

Goodput is productive time over wall time. Time is productive in which a start trained and made steps that were kept;
restarts, restores and steps that were computed again are not. Durations of each host are its own.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from rekindle.memory.incident import STARTED, Incident

__all__ = ["Totals", "add_up"]


@dataclass(frozen=True)
class Totals:
    """The cost of all incidents of a job."""

    incidents: int
    """Starts that a fault has ended, each counted once for all hosts."""
    lost: int
    """Steps that were computed again."""
    median_outage: float | None
    """Seconds from a fault, or its notice, to the first new step; of several hosts the longest."""
    longest_outage: float | None
    unrecovered: int
    """Incidents after which no new step is known."""
    productive: float
    wall: float
    """Seconds, summed over hosts."""
    left_out: int
    """Records whose time counts in neither: what was trained, or since when, isn't known."""

    @property
    def goodput(self) -> float | None:
        """Share of productive time, from 0 to 1; None while no time is known."""
        return self.productive / self.wall if self.wall > 0 else None

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "goodput": self.goodput}


def add_up(records: Iterable[Incident]) -> Totals:
    """Adds up the records of all hosts: incidents, and the stretches up to the job's end or up to now."""
    records = list(records)
    faults: dict[str, list[Incident]] = {}
    for record in records:
        if record.is_fault:
            faults.setdefault(record.start, []).append(record)
    outages = [max(known) for each in faults.values() if (known := [r.outage for r in each if r.outage is not None])]
    timed = [(good, wall) for r in records if (good := _productive(r)) is not None and (wall := _wall(r)) is not None]
    return Totals(
        incidents=len(faults),
        lost=sum(max(record.lost or 0 for record in each) for each in faults.values()),
        median_outage=statistics.median(outages) if outages else None,
        longest_outage=max(outages, default=None),
        unrecovered=len(faults) - len(outages),
        productive=sum(good for good, _ in timed),
        wall=sum(wall for _, wall in timed),
        left_out=len(records) - len(timed),
    )


def _productive(record: Incident) -> float | None:
    """Returns the seconds that made steps which were kept.

    The step under way at the fault counts as lost, as if it had taken the time of a whole one.
    """
    if record.trained is None or record.step < record.began_at:
        return None
    if not record.is_fault:
        return record.trained
    made = record.step - record.began_at
    kept = max(0, made - (record.lost or 0))
    return record.trained * kept / (made + 1)


def _wall(record: Incident) -> float | None:
    """Returns the seconds of a start on its host, and of the time until the next one had a process there."""
    if record.seconds is None:
        return None
    begin, started = record.begin, record.moments.get(STARTED)
    return record.seconds + (max(0.0, started - begin) if begin is not None and started is not None else 0.0)
