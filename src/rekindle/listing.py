"""The checkpoints that exist, as a training script may want to know them."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from rekindle.snapshot.lineage import Incarnation, live
from rekindle.snapshot.memory import JobDir
from rekindle.storage.catalog import STORAGE, survey
from rekindle.storage.contract import Store

__all__ = ["Checkpoint", "list_checkpoints"]


@dataclass(frozen=True)
class Checkpoint:
    """One checkpoint that exists."""

    step: int
    places: tuple[str, ...]
    """``memory`` (of this node), ``storage``, or both."""
    world: int
    """Ranks that saved it."""
    generation: int
    """Number of the job's start that saved it."""
    pinned: bool = False
    """True while retention leaves it alone on storage."""

    @property
    def durable(self) -> bool:
        return STORAGE in self.places


def list_checkpoints(job: JobDir | None, store: Store | None, mates: Collection[int]) -> list[Checkpoint]:
    """All complete ones that this node, of ranks ``mates``, can see, newest first; abandoned ones are left out."""
    found: dict[tuple[int, Incarnation], Checkpoint] = {}
    for copy in live(survey(job, store)):
        if copy.place == STORAGE or copy.ranks.issuperset(mates):
            known = found.get(copy.key)
            places = (*known.places, copy.place) if known else (copy.place,)
            pinned = copy.pinned or (known is not None and known.pinned)
            found[copy.key] = Checkpoint(copy.step, places, copy.world, copy.incarnation.generation, pinned)
    return list(found.values())
