"""Which start of the job wrote a shard, and which shards a later start has left behind.

Every start of a job is an *incarnation*: a random id, and a generation that is one more than the highest that any rank
could see when it started. It names the checkpoint that it continued from. Clocks play no part: an incarnation of a
higher generation began after all of a lower one had ended, because one job runs once at a time.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeVar

from rekindle.errors import FormatError
from rekindle.format.fields import check_integer
from rekindle.format.names import MAX_RANKS, MAX_STEP

__all__ = ["CheckpointKey", "Incarnation", "ShardId", "continued_by_another", "drop_superseded", "superseded_by"]

_ID = re.compile(r"[0-9a-f]{16}\Z")
_LAST_GENERATION = 1 << 62
"""Far beyond what starts can count up to; a later start still has room for its own."""


@dataclass(frozen=True, order=True)
class Incarnation:
    """One start of a job. Ordered by generation."""

    generation: int
    id: str
    parent: str = ""
    """Incarnation that wrote the checkpoint this one continued from; empty for a fresh start."""
    parent_step: int = 0
    """Step this one continued from."""

    @staticmethod
    def begin(generation: int) -> Incarnation:
        return Incarnation(generation, secrets.token_hex(8))

    def to_json(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "generation": self.generation,
            "parent": self.parent,
            "parent_step": self.parent_step,
        }


class CheckpointKey(NamedTuple):
    """Names one checkpoint. Ordered by step, then by generation."""

    step: int
    incarnation: Incarnation


@dataclass(frozen=True)
class ShardId:
    """Where a shard belongs: step, rank, world size and the incarnation that wrote it."""

    step: int
    rank: int
    world: int
    incarnation: Incarnation
    persist: bool = True
    """Whether the policy asks for this step on storage."""
    save: str = ""
    """Drawn for this very save, where the ranks agree on one: shards of two saves are never combined."""
    pinned: bool = False
    """True if retention has to leave the checkpoint alone once it is on storage."""

    @property
    def checkpoint(self) -> CheckpointKey:
        """The checkpoint that the shard is a part of."""
        return CheckpointKey(self.step, self.incarnation)

    def to_json(self) -> dict[str, Any]:
        fields: dict[str, Any] = {"step": self.step, "rank": self.rank, "world": self.world, "persist": self.persist}
        if self.pinned:
            fields["pinned"] = True
        if self.save:
            fields["save"] = self.save
        return {**fields, "incarnation": self.incarnation.to_json()}

    @staticmethod
    def from_json(value: Any) -> ShardId:
        try:
            inc = value["incarnation"]
            stamp = ShardId(
                step=check_integer(value["step"], 0, MAX_STEP),
                rank=check_integer(value["rank"], 0, MAX_RANKS - 1),
                world=check_integer(value["world"], 1, MAX_RANKS),
                persist=bool(value["persist"]),
                pinned=bool(value.get("pinned", False)),
                incarnation=Incarnation(
                    generation=check_integer(inc["generation"], 0, _LAST_GENERATION),
                    id=_id(inc["id"]),
                    parent=_id(inc["parent"]) if inc["parent"] else "",
                    parent_step=check_integer(inc["parent_step"], 0, MAX_STEP),
                ),
                save=_id(value["save"]) if value.get("save") else "",
            )
            if stamp.rank >= stamp.world:
                raise ValueError(f"rank {stamp.rank} of {stamp.world}")
            return stamp
        except (KeyError, TypeError, ValueError) as error:
            raise FormatError(f"stamp is not readable: {error!r}") from error


class _Written(Protocol):
    """Anything that is of one step and was written by one start of the job."""

    @property
    def step(self) -> int: ...
    @property
    def incarnation(self) -> Incarnation: ...


_W = TypeVar("_W", bound=_Written)


def _id(value: Any) -> str:
    """The id of an incarnation, which becomes a part of file names, or of a save."""
    if type(value) is not str or not _ID.match(value):
        raise ValueError("an id should be 16 hexadecimal digits")
    return value


def superseded_by(step: int, incarnation: Incarnation, seen: Iterable[Incarnation]) -> Incarnation | None:
    """The incarnation that left this step behind, or None while it stands.

    A later incarnation that continued from an earlier step has abandoned everything newer than that step which it did
    not write itself.
    """
    for other in seen:
        if other.generation > incarnation.generation and step > other.parent_step:
            return other
    return None


def drop_superseded(found: Collection[_W], also: Iterable[Incarnation] = ()) -> list[_W]:
    """Those that no later start of the job has left behind, in the same order. ``also``: more starts to go by."""
    seen = {one.incarnation for one in found} | set(also)
    return [one for one in found if not superseded_by(one.step, one.incarnation, seen)]


def continued_by_another(ours: Incarnation, newest: Incarnation) -> bool:
    """Whether the job went on without ``ours``: the ``newest`` on storage is by another start, and that is no older.

    Then what this start saves is a branch that nobody follows.
    """
    return newest != ours and newest.generation >= ours.generation
