"""Checks that the shards of a checkpoint agree, and together hold all of every tensor that they name."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any

from rekindle.errors import CorruptError
from rekindle.format.boxes import Box, uncovered
from rekindle.format.lineage import ShardId
from rekindle.format.receipt import Receipt

__all__ = ["find_defect", "tensor_names"]


def tensor_names(structure: Any) -> Iterator[str]:
    """Yields the names of all tensors in a receipt's structure, once for each leaf."""
    if isinstance(structure, list):
        for child in structure:
            yield from tensor_names(child)
    elif isinstance(structure, dict):
        if isinstance(structure.get("$tensor"), str):
            yield structure["$tensor"]
        else:
            yield from tensor_names(list(structure.values()))


def find_defect(receipts: Iterable[Receipt]) -> str | None:
    """Describes why shards don't make up a checkpoint: they contradict each other, or elements of a tensor are missing.

    Returns None when every tensor that one of them names is there with all its elements.
    """
    boxes: defaultdict[str, list[Box]] = defaultdict(list)
    kinds: dict[str, tuple[str, tuple[int, ...]]] = {}
    named: dict[str, int] = {}
    first: ShardId | None = None
    for receipt in receipts:
        rank = receipt.stamp.rank
        first = first or receipt.stamp
        if receipt.stamp.save != first.save:
            return f"rank {rank}'s shard belongs to another save than rank {first.rank}'s"
        for chunk in receipt.layout.chunks:
            kind = chunk.dtype, chunk.global_shape
            there = boxes[chunk.name]
            if chunk.own:
                continue
            if kinds.setdefault(chunk.name, kind) != kind:
                return f"{chunk.name} is {_kind(*kind)} on rank {rank}, {_kind(*kinds[chunk.name])} on another"
            there.append(chunk.box)
        for name in tensor_names(receipt.structure):
            named.setdefault(name, rank)
    for name, rank in named.items():
        if name not in boxes:
            return f"{name}, which rank {rank} names, is in no shard"
    for name, (_, shape) in kinds.items():
        try:
            missing = uncovered(Box((0,) * len(shape), shape), boxes[name])
        except CorruptError as error:
            return f"{name}: {error}"
        if missing:
            return f"{name}{missing[0]} is in no shard"
    return None


def _kind(dtype: str, shape: tuple[int, ...]) -> str:
    return f"{dtype}{list(shape)}"
