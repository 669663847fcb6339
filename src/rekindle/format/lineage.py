"""Defines incarnations, the starts of a job, and finds the steps that a later start superseded.

Each start of a job is an *incarnation*: a random id, and a generation that is one more than the highest that any rank
could see at that start. It names the checkpoint that it continued from. Clocks play no part: one job runs once at a
time, so an incarnation of a higher generation began after all of lower generations had ended.

An incarnation *supersedes* each step of a lower generation that is newer than the step it continued from: the job went
on without that step, and no later start continues from it.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeVar

from rekindle.errors import FormatError
from rekindle.format.fields import check_integer
from rekindle.format.metric import Metric
from rekindle.format.names import MAX_RANKS, MAX_STEP

__all__ = ["CheckpointKey", "Incarnation", "ShardId", "check_id", "continued_by_another", "drop_superseded"]
__all__ += ["MAX_GENERATION", "superseded_by"]

_ID = re.compile(r"[0-9a-f]{16}\Z")
MAX_GENERATION = 1 << 62
"""Far above every generation that a job can reach. A later start still has room for its own."""


@dataclass(frozen=True, order=True)
class Incarnation:
    """Identifies one start of a job. Ordered by generation."""

    generation: int
    id: str
    parent: str = ""
    """Id of the incarnation that wrote the checkpoint which this one continued from. Empty for a fresh start."""
    parent_step: int = 0
    """Step that this incarnation continued from. 0 for a fresh start."""

    @staticmethod
    def begin(generation: int) -> Incarnation:
        """Returns a new incarnation with a random id."""
        return Incarnation(generation, secrets.token_hex(8))

    def to_json(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "generation": self.generation,
            "parent": self.parent,
            "parent_step": self.parent_step,
        }


class CheckpointKey(NamedTuple):
    """Identifies one checkpoint. Ordered by step, then by generation."""

    step: int
    incarnation: Incarnation


@dataclass(frozen=True)
class ShardId:
    """Identifies a shard: step, rank, world size and the incarnation that wrote it.

    Documents carry it as their ``stamp``.
    """

    step: int
    rank: int
    world: int
    incarnation: Incarnation
    persist: bool = True
    """True if the policy asks for this step on storage."""
    save: str = ""
    """Random id of the save, where the ranks agreed on one. Shards of different saves are never combined."""
    pinned: bool = False
    """True if retention must keep the checkpoint once it is on storage."""
    metric: Metric | None = None
    """Tells how good the checkpoint is. In the stamps of rank 0 and of manifests."""

    @property
    def checkpoint(self) -> CheckpointKey:
        """Key of the checkpoint that the shard is a part of."""
        return CheckpointKey(self.step, self.incarnation)

    def to_json(self) -> dict[str, Any]:
        fields: dict[str, Any] = {"step": self.step, "rank": self.rank, "world": self.world, "persist": self.persist}
        if self.pinned:
            fields["pinned"] = True
        if self.save:
            fields["save"] = self.save
        if self.metric is not None:
            fields["metric"] = list(self.metric)
        return {**fields, "incarnation": self.incarnation.to_json()}

    @staticmethod
    def from_json(value: Any) -> ShardId:
        """Reads the ``stamp`` of a document. Raises FormatError for one that makes no sense."""
        try:
            inc = value["incarnation"]
            stamp = ShardId(
                step=check_integer(value["step"], 0, MAX_STEP),
                rank=check_integer(value["rank"], 0, MAX_RANKS - 1),
                world=check_integer(value["world"], 1, MAX_RANKS),
                persist=bool(value["persist"]),
                pinned=bool(value.get("pinned", False)),
                incarnation=Incarnation(
                    generation=check_integer(inc["generation"], 0, MAX_GENERATION),
                    id=check_id(inc["id"]),
                    parent=check_id(inc["parent"]) if inc["parent"] else "",
                    parent_step=check_integer(inc["parent_step"], 0, MAX_STEP),
                ),
                save=check_id(value["save"]) if value.get("save") else "",
                metric=Metric.from_json(value.get("metric")),
            )
            if stamp.rank >= stamp.world:
                raise ValueError(f"rank {stamp.rank} of {stamp.world}")
            return stamp
        except (KeyError, TypeError, ValueError) as error:
            raise FormatError(f"stamp is not readable: {error!r}") from error


class _Written(Protocol):
    """Describes anything that one incarnation wrote at one step."""

    @property
    def step(self) -> int: ...
    @property
    def incarnation(self) -> Incarnation: ...


_W = TypeVar("_W", bound=_Written)


def check_id(value: Any) -> str:
    """Returns the id of an incarnation, which becomes a part of file names, or that of a save."""
    if type(value) is not str or not _ID.match(value):
        raise ValueError("an id must have 16 hexadecimal digits")
    return value


def superseded_by(step: int, incarnation: Incarnation, seen: Iterable[Incarnation]) -> Incarnation | None:
    """Returns an incarnation among ``seen`` that superseded the step of ``incarnation``; None if there is none."""
    for other in seen:
        if other.generation > incarnation.generation and step > other.parent_step:
            return other
    return None


def drop_superseded(found: Collection[_W], also: Iterable[Incarnation] = ()) -> list[_W]:
    """Returns the items of ``found`` that no incarnation superseded, in the same order.

    The incarnations that count are those of ``found`` and ``also``.
    """
    seen = {one.incarnation for one in found} | set(also)
    return [one for one in found if not superseded_by(one.step, one.incarnation, seen)]


def continued_by_another(ours: Incarnation, newest: Incarnation) -> bool:
    """True if another start, not older than ``ours``, wrote the ``newest`` checkpoint on storage.

    The job then went on without this start. No later start will continue from its steps.
    """
    return newest != ours and newest.generation >= ours.generation
