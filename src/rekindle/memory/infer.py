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
from rekindle.memory.job_dir import JobDir
from rekindle.memory.local_state import (
    LocalState,
    LocalStatePlan,
    padded,
    read_before_update,
    read_local_state_plan,
    read_local_states,
)

__all__ = ["infer_local_state"]


def infer_local_state(job: JobDir, plan: LocalStatePlan, rank: int) -> LocalState | None:
    """Returns the local state of the step that ``rank`` was about to complete.

    None if the rank was not inside of an update, or no other rank allows an inference.
    """
    before = read_before_update(job, rank)
    if before is None or not plan.fits(before):
        return None
    others = sorted({other for ranks in plan.replicas.values() for other in ranks} - {rank})
    for other in others:
        try:
            theirs = read_local_state_plan(job, other)
        except FormatError:
            continue
        theirs_before = read_before_update(job, other)
        if theirs is None or theirs_before is None or theirs_before.stamp.checkpoint != before.stamp.checkpoint:
            continue
        if theirs.static != plan.static or theirs.blocks != plan.blocks or not theirs.fits(theirs_before):
            continue
        for after in read_local_states(job, other):
            if after.stamp.checkpoint == before.stamp.checkpoint and theirs.fits(after):
                return _apply_change(plan, before, theirs_before, after)
    return None


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
