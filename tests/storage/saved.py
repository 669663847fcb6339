"""Small checkpoints in a store, and what a look at it finds."""

from __future__ import annotations

from pathlib import Path

from rekindle.format.lineage import Incarnation, ShardId
from rekindle.storage.catalog import find_copies
from rekindle.storage.store import Store
from rekindle.storage.verify import verify
from tests.conftest import make_shard

FIRST = Incarnation(1, "a" * 16)
SECOND = Incarnation(2, "b" * 16, FIRST.id, 4)
"""Continued from step 4."""
ANEW = Incarnation(2, "c" * 16)
"""Begun from step 0."""


def content(step: int, rank: int = 0) -> dict[str, bytes]:
    return {"x": b"step %d " % step * 1000, "y": b"rank %d" % rank}


def write(store: Store, step: int, rank: int = 0, world: int = 1, incarnation: Incarnation = FIRST) -> ShardId:
    receipt, data = make_shard(ShardId(step, rank, world, incarnation), content(step, rank))
    store.write_shard(receipt, memoryview(data), lambda nbytes: None)
    return receipt.stamp


def save(store: Store, *steps: int, incarnation: Incarnation = FIRST) -> None:
    for step in steps:
        assert store.publish(write(store, step, incarnation=incarnation))


def steps(store: Store) -> list[int]:
    return [p.stamp.step for p in store.published()]


def files(root: Path) -> set[str]:
    return {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()}


def assert_sound(store: Store) -> None:
    for copy in find_copies(None, store):
        assert verify(copy) == []


def tidy(store: Store) -> None:
    """Does what an agent does after it has published."""
    store.prune(1, None)
    store.clean_up()
