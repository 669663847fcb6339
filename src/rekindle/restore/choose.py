"""Chooses the checkpoint to continue from: one pure function of what every rank can read."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import SupportsIndex

from rekindle.errors import UsageError
from rekindle.format.lineage import CheckpointKey, superseded_by
from rekindle.format.names import MAX_STEP
from rekindle.session.inventory import Offer
from rekindle.storage.catalog import MEMORY, PEER

__all__ = ["SUPERSEDED", "Choice", "check_chosen_step", "choose"]

SUPERSEDED = "superseded"
"""First word of the reason for rejecting what nobody goes on from any more, which is in order."""
_SOME = 8
"""Ranks that a message names at most."""


@dataclass
class Choice:
    """Checkpoints that every rank can read, best first, and why each newer one is not among them."""

    candidates: list[CheckpointKey] = field(default_factory=list)
    rejected: dict[CheckpointKey, str] = field(default_factory=dict)
    left: set[CheckpointKey] = field(default_factory=set)
    """Superseded ones that all ranks could read from memory: steps that the job has made, and does not go on from."""


def check_chosen_step(step: SupportsIndex | None, call: str = "restore") -> int | None:
    """Returns the ``step`` that a user asks ``call`` for as a number; None for the newest. Raises UsageError for what
    is none.

    True and 1.0 equal the number 1, and are mistakes more likely than meant.
    """
    if step is None:
        return None
    number = operator.index(step) if hasattr(step, "__index__") and not isinstance(step, bool) else -1
    if not 0 <= number <= MAX_STEP:
        raise UsageError(
            f"{call}(step={step!r}): must be None, for the newest checkpoint, or a whole number of 0 to {MAX_STEP}"
        )
    return number


def choose(offers: Sequence[Sequence[Offer]], step: int | None = None) -> Choice:
    """Orders what all ranks can read. ``offers`` has one list per rank; ``step`` restricts the choice to one step.

    Shards of different incarnations never make up a checkpoint together. What a later incarnation superseded is out.
    """
    keys = {CheckpointKey(offer.step, offer.incarnation) for rank in offers for offer in rank}
    starts = {incarnation for _, incarnation in keys}
    readable = [{(o.step, o.incarnation) for o in rank if o.places} for rank in offers]
    world, here = len(offers), {MEMORY, PEER}
    in_memory = [{(o.step, o.incarnation) for o in rank if o.world == world and here & {*o.places}} for rank in offers]
    choice = Choice()
    for key in sorted(keys, reverse=True):
        if step is not None and key.step != step:
            continue
        without = [rank for rank, have in enumerate(readable) if key not in have]
        successor = superseded_by(*key, starts)
        if successor is not None:
            if all(key in have for have in in_memory):
                choice.left.add(key)
            choice.rejected[key] = (
                f"{SUPERSEDED}: the job went on from step {successor.parent_step} as generation {successor.generation}"
            )
        elif without:
            choice.rejected[key] = (
                f"incomplete: {_name(without, len(offers))} no shard of it (ended before completing this step, or its "
                "memory is gone)"
            )
        else:
            choice.candidates.append(key)
    return choice


def _name(ranks: list[int], world: int) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]} of {world} has"
    names = ", ".join(map(str, ranks[:_SOME])) + (", ..." if len(ranks) > _SOME else "")
    return f"ranks {names} of {world} have"
