"""Which start of the job wrote a shard, and which shards a later start has left behind.

Every start of a job is an *incarnation*: a random id, and a generation that is one more than the highest that any rank
could see when it started. It names the checkpoint that it continued from. Clocks play no part: an incarnation of a
higher generation began after all of a lower one had ended, because one job runs once at a time.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from rekindle.errors import FormatError

__all__ = ["Incarnation", "Stamp", "retired"]


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


@dataclass(frozen=True)
class Stamp:
    """Where a shard belongs: step, rank, world size and the incarnation that wrote it."""

    step: int
    rank: int
    world: int
    incarnation: Incarnation
    persist: bool = True
    """Whether the policy asks for this step on storage."""

    @property
    def key(self) -> tuple[int, Incarnation]:
        """What all shards of one checkpoint have in common."""
        return self.step, self.incarnation

    def to_json(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "rank": self.rank,
            "world": self.world,
            "persist": self.persist,
            "incarnation": self.incarnation.to_json(),
        }

    @staticmethod
    def from_json(value: Any) -> Stamp:
        try:
            inc = value["incarnation"]
            stamp = Stamp(
                step=int(value["step"]),
                rank=int(value["rank"]),
                world=int(value["world"]),
                persist=bool(value["persist"]),
                incarnation=Incarnation(
                    generation=int(inc["generation"]),
                    id=str(inc["id"]),
                    parent=str(inc["parent"]),
                    parent_step=int(inc["parent_step"]),
                ),
            )
            if stamp.step < 0 or not 0 <= stamp.rank < stamp.world:
                raise ValueError(f"step {stamp.step}, rank {stamp.rank} of {stamp.world}")
            return stamp
        except (KeyError, TypeError, ValueError) as error:
            raise FormatError(f"stamp is not readable: {error!r}") from error


def retired(step: int, incarnation: Incarnation, seen: Iterable[Incarnation]) -> Incarnation | None:
    """The incarnation that left this step behind, or None while it stands.

    A later incarnation that continued from an earlier step has abandoned everything newer than that step which it did
    not write itself.
    """
    for other in seen:
        if other.generation > incarnation.generation and step > other.parent_step:
            return other
    return None
