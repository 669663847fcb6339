"""Puts what is known of a job on one axis of time: steps, snapshots, drains, faults and restarts. Pure functions.

All times are seconds since 1970. Durations within an incident are of its host's monotonic clock.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

from rekindle.memory.incident import FIRST_STEP, NOTICED, STARTED, Incident
from rekindle.storage.catalog import MEMORY, STORAGE

__all__ = ["MOST_POINTS", "draw", "thin_out"]

T = TypeVar("T")

MOST_POINTS = 1500
"""Points of a line, about one for each pixel. Of more, every second one is left out, or more of them."""


def draw(lines: Sequence[Mapping[str, Any]], records: Iterable[Incident]) -> dict[str, Any]:
    """Returns the points of checkpoints, and the marks of incidents, oldest first."""
    return {
        "memory": _points(lines, MEMORY),
        "storage": _points(lines, STORAGE),
        "incidents": [_mark(record) for record in records if record.is_fault],
        "ends": [record.at for record in records if not record.is_fault],
    }


def _points(lines: Iterable[Mapping[str, Any]], place: str) -> list[tuple[float, int]]:
    known = [(line[place]["saved_at"], line["step"]) for line in lines if line[place] is not None]
    return thin_out(sorted((at, step) for at, step in known if at is not None))


def thin_out(points: Sequence[T], most: int = MOST_POINTS) -> list[T]:
    """Leaves points out, evenly, so that no more than ``most`` are left. The first and the last one stay."""
    if len(points) <= most:
        return list(points)
    return [points[index * (len(points) - 1) // (most - 1)] for index in range(most)]


def _mark(record: Incident) -> dict[str, Any]:
    begin = record.begin

    def wall(name: str) -> float | None:
        """Time of a moment by the wall clock: that of the notice, and the seconds since."""
        at, noticed = record.moments.get(name), record.moments.get(NOTICED, begin)
        return None if at is None or noticed is None else record.at + at - noticed

    noticed = record.moments.get(NOTICED, begin)
    return {
        "name": record.name,
        "began": record.at if begin is None or noticed is None else record.at - (noticed - begin),
        "started": wall(STARTED),
        "back": wall(FIRST_STEP),
        "cause": record.cause,
        "step": record.step,
        "restored_step": record.restored_step,
    }
