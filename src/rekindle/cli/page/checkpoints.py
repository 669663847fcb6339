"""Puts the copies of each checkpoint on one line: in memory, on other nodes, on storage."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from rekindle.cli.ls import Row
from rekindle.format.lineage import CheckpointKey
from rekindle.storage.catalog import MEMORY, PEER, STORAGE
from rekindle.storage.verdicts import Verdict

__all__ = ["line_up", "measure"]


def line_up(rows: Iterable[Row], verdicts: Mapping[str, Verdict]) -> list[dict[str, Any]]:
    """Returns one line for each checkpoint, in the order of ``rows``, which is newest first."""
    lines: dict[CheckpointKey, dict[str, Any]] = {}
    for row in rows:
        copy = row.entry.copy
        line = lines.setdefault(copy.checkpoint, _begin(row))
        line["node_safe"] |= row.node_safe
        line["pinned"] |= copy.pinned
        line["best"] |= row.best
        line["metric"] = line["metric"] or (None if copy.metric is None else str(copy.metric))
        place = _describe_place(row)
        if copy.place == STORAGE:
            verdict = verdicts.get(Verdict.name_of(copy.checkpoint))
            place["read_at"] = None if verdict is None else verdict.at
            place["sound"] = None if verdict is None else verdict.sound
        line[copy.place] = place
    return list(lines.values())


def _begin(row: Row) -> dict[str, Any]:
    start = row.entry.copy.incarnation
    return {
        "step": row.entry.copy.step,
        "start": start.id,
        "generation": start.generation,
        "continued_from": start.parent_step if start.parent else None,
        **{"node_safe": False, "pinned": False, "best": False, "metric": None},
        **{MEMORY: None, PEER: None, STORAGE: None},
    }


def _describe_place(row: Row) -> dict[str, Any]:
    entry = row.entry
    return {
        "condition": entry.condition,
        "saved_at": entry.saved_at,
        "ranks": len(entry.copy.ranks),
        "world": entry.copy.world,
        "bytes": None if entry.copy.place == PEER else entry.nbytes,
        "nodes": row.nodes,
        "missing": row.missing,
    }


def measure(lines: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, int]]:
    """Returns the number of checkpoints of each place, and their bytes as far as they are known."""
    found = {place: {"checkpoints": 0, "bytes": 0} for place in (MEMORY, PEER, STORAGE)}
    for line in lines:
        for place, total in found.items():
            if line[place] is not None:
                total["checkpoints"] += 1
                total["bytes"] += line[place]["bytes"] or 0
    return found
