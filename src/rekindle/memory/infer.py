"""Infers the local state of a rank that died inside of its update from that of other ranks.

All ranks run one program. A value that the update and the code after it did not change on another rank would not have
changed here. A value that was the same on both ranks before would have been the same after. If a value differs between
ranks *and* changes, nothing is inferred.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from rekindle.errors import FormatError
from rekindle.memory.elsewhere import Elsewhere
from rekindle.memory.job_dir import JobDir
from rekindle.memory.local_state import LocalFiles, LocalState, LocalStatePlan, padded, read_local_files

__all__ = ["infer_local_state"]

_ASKED = 4
"""Ranks of other nodes that are asked, at most. They all do the same, so the first one mostly knows."""


def infer_local_state(job: JobDir, ours: LocalFiles, rank: int, elsewhere: Elsewhere) -> LocalState | None:
    """Returns the local state of the step that ``rank`` was about to complete.

    None if the rank was not inside of an update, or no other rank allows an inference.
    """
    before = ours.before
    if before is None:
        return None
    for theirs in _others(job, ours.plan, rank, elsewhere):
        if theirs.before is None or theirs.before.stamp.checkpoint != before.stamp.checkpoint:
            continue
        if theirs.plan.static != ours.plan.static or theirs.plan.blocks != ours.plan.blocks:
            continue
        for after in theirs.states:
            if after.stamp.checkpoint == before.stamp.checkpoint:
                return _apply_change(ours.plan, before, theirs.before, after)
    return None


def _others(job: JobDir, plan: LocalStatePlan, rank: int, elsewhere: Elsewhere) -> Iterator[LocalFiles]:
    """Yields the local states of ranks that hold replicas: those of this node, then some of other nodes."""
    away = []
    for other in sorted({other for ranks in plan.replicas.values() for other in ranks} - {rank}):
        try:
            found = read_local_files(job.paths, other)
        except FormatError:
            continue
        if found is not None:
            yield found
        else:
            away.append(other)
    for other in away[:_ASKED]:
        found = elsewhere.local_files(other)
        if found is not None:
            yield found


def _apply_change(plan: LocalStatePlan, ours: LocalState, before: LocalState, after: LocalState) -> LocalState | None:
    values = [json.loads(state.values) for state in (ours, before, after)]
    if len({len(found) for found in values}) != 1:
        return None
    new_values = _infer_each(zip(*values, strict=True))
    sizes = [stop - start for start, stop in (plan.layout.blocks[number] for number in plan.blocks)]
    new_blocks = _infer_each(zip(*(_cut(state, sizes) for state in (ours, before, after)), strict=True))
    if new_values is None or new_blocks is None:
        return None
    body = b"".join(block.ljust(padded(len(block)), b"\0") for block in new_blocks)
    text = json.dumps(new_values, separators=(",", ":"), allow_nan=False).encode()
    return replace(ours, values=text, tensors=memoryview(body))


def _cut(state: LocalState, sizes: Iterable[int]) -> Iterator[bytes]:
    at = 0
    for size in sizes:
        yield bytes(state.tensors[at : at + size])
        at += padded(size)


def _infer_each(triples: Iterable[tuple[Any, Any, Any]]) -> list[Any] | None:
    """Returns our values after the update, from triples of ours before, theirs before and theirs after.

    None if one of them can't be inferred.
    """
    found = []
    for ours, before, after in triples:
        if before == after:
            found.append(ours)
        elif ours == before:
            found.append(after)
        else:
            return None
    return found
