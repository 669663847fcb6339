"""Holds what snapshots and drains take from training, as measured on the node, and the pause chosen by it."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import asdict, dataclass, fields

from rekindle.format.fields import check_seconds, check_texts, loads
from rekindle.format.receipt import read_file, write_atomic
from rekindle.memory.job_dir import JobDir

__all__ = ["Prices", "read_pause", "read_prices", "write_pause", "write_prices"]

_PRICES, _PAUSE = "prices.json", "pause"
"""Names of the files in the job's directory."""


@dataclass(frozen=True)
class Prices:
    """Times in seconds, each a median or a mean of the newest ones. None is what isn't known yet."""

    step: float
    """Length of a step; of those without a snapshot, where there are such."""
    snapshot: float
    """Time that a snapshot takes from training: by as much a step that hides one is longer than others. Where all have
    one, the time for which training stood still."""
    snapshot_gap: float | None = None
    """Time from one snapshot to the next."""
    drain: float | None = None
    """Length of a write to storage."""
    drain_cost: float | None = None
    """Time that one takes from training: by as much the steps beside it are longer than others."""
    drain_gap: float | None = None
    """Time from the begin of one to the begin of the next."""

    def to_json(self) -> dict[str, float]:
        """Returns what is known, by name."""
        return {name: round(value, 6) for name, value in asdict(self).items() if value is not None}

    @staticmethod
    def from_json(value: object) -> Prices | None:
        """Reads what ``to_json`` gave; None for an empty record. Raises ValueError for what is none."""
        if value == {}:
            return None
        if not isinstance(value, dict) or not {"step", "snapshot"} <= value.keys():
            raise ValueError("expected the prices of saving")
        known = {one.name: check_seconds(value[one.name]) for one in fields(Prices) if one.name in value}
        if min(known.values()) < 0:
            raise ValueError("a price is below zero")
        return Prices(**known)


def read_prices(job: JobDir, start: str) -> Prices | None:
    """Returns what the incarnation ``start`` has measured on this node; None if nothing."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        value = loads(read_file(job.path / _PRICES))
        if check_texts([value["start"]])[0] == start:
            return Prices.from_json(value["prices"])
    return None


def write_prices(job: JobDir, start: str, prices: Prices) -> None:
    """Replaces what this node knows. Raises OSError when memory is full or gone."""
    write_atomic(job.path / _PRICES, json.dumps({"start": start, "prices": prices.to_json()}).encode())


def read_pause(job: JobDir) -> float | None:
    """Returns the least seconds between drains that nobody asked for, where the agent chooses them; None if unknown."""
    with suppress(OSError, ValueError):
        return check_seconds(float(read_file(job.path / _PAUSE)))
    return None


def write_pause(job: JobDir, seconds: float) -> None:
    """Notes the least seconds between drains that nobody asked for. Raises OSError when memory is full or gone."""
    write_atomic(job.path / _PAUSE, b"%.3f" % seconds)
