"""The small state of a rank that died inside of its update, inferred from how it fared with the others.

All ranks run one program. What the update and what follows it did not change on another rank, they would not have
changed here; what was the same on both before it would have been the same after it. What differs between ranks *and*
changes after the update can't be inferred, and nothing is then.
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
    """The small state of the step that ``rank`` was about to complete. None if it was not, or can't be inferred."""
    before = read_before_update(job, rank)
    if before is None or not plan.fits(before):
        return None
    local_ranks = sorted({mate for ranks in plan.replicas.values() for mate in ranks} - {rank})
    for mate in local_ranks:
        try:
            theirs = read_local_state_plan(job, mate)
        except FormatError:
            continue
        theirs_before = read_before_update(job, mate)
        if theirs is None or theirs_before is None or theirs_before.stamp.checkpoint != before.stamp.checkpoint:
            continue
        if theirs.static != plan.static or theirs.blocks != plan.blocks or not theirs.fits(theirs_before):
            continue
        for after in read_local_states(job, mate):
            if after.stamp.checkpoint == before.stamp.checkpoint and theirs.fits(after):
                return _transfer(plan, before, theirs_before, after)
    return None


def _transfer(plan: LocalStatePlan, ours: LocalState, before: LocalState, after: LocalState) -> LocalState | None:
    values = [json.loads(half.values) for half in (ours, before, after)]
    if len({len(found) for found in values}) != 1:
        return None
    new_values = _each(zip(*values, strict=True))
    sizes = [stop - start for start, stop in (plan.layout.blocks[number] for number in plan.blocks)]
    new_blocks = _each(zip(*(_cut(half, sizes) for half in (ours, before, after)), strict=True))
    if new_values is None or new_blocks is None:
        return None
    body = b"".join(block.ljust(padded(len(block)), b"\0") for block in new_blocks)
    text = json.dumps(new_values, separators=(",", ":"), allow_nan=False).encode()
    return replace(ours, values=text, tensors=memoryview(body))


def _cut(half: LocalState, sizes: Iterable[int]) -> Iterator[bytes]:
    at = 0
    for size in sizes:
        yield bytes(half.tensors[at : at + size])
        at += padded(size)


def _each(triples: Iterable[tuple[Any, Any, Any]]) -> list[Any] | None:
    """Of (ours before, theirs before, theirs after): ours after. None when one can't be told."""
    found = []
    for ours, before, after in triples:
        if before == after:
            found.append(ours)
        elif ours == before:
            found.append(after)
        else:
            return None
    return found
