"""Places the shards of Megatron-core's distributed optimizers, and what else a model has, in whole tensors.

A DistributedOptimizer keeps runs of its parameters' elements, cut without regard to their shapes. The model's own
sharded state dict tells which box of which whole tensor a parameter is.
"""

from __future__ import annotations

import hashlib
import importlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from rekindle.errors import UsageError
from rekindle.format.boxes import Box
from rekindle.state.parts import FlatPart

__all__ = ["Place", "agree", "place", "unplaced", "with_ranks"]

_mapping: Any = importlib.import_module("megatron.core.dist_checkpointing.mapping")
_dict_utils: Any = importlib.import_module("megatron.core.dist_checkpointing.dict_utils")

_METADATA = {"singleton_local_shards": True}
"""Asks for a name of its own for each layer, each expert and each half of a gated unit."""


@dataclass(frozen=True)
class Place:
    """A run of elements that this rank holds: those from ``first`` to ``last``, exclusive, of a box of a tensor."""

    key: str
    """The model's name for the whole tensor."""
    shape: tuple[int, ...]
    box: Box
    first: int
    last: int
    start: int
    """Index of the first one in the flat shard."""
    ranks: tuple[int, ...] = ()
    """All ranks that hold the same run."""

    def of(self, shard: torch.Tensor) -> FlatPart:
        """Returns the run in a tensor that is laid out as the shard."""
        flat = shard.detach().view(-1)
        return FlatPart(flat, self.start, self.shape, self.first, self.last, shard, self.ranks, self.box)

    @property
    def digest(self) -> bytes:
        """Identifies the elements."""
        text = repr((self.key, self.shape, self.box, self.first, self.last))
        return hashlib.blake2b(text.encode(), digest_size=12).digest()


def place(chunks: Iterable[Any], shards: dict[int, tuple[torch.Tensor, int, int]]) -> dict[int, list[Place]]:
    """Maps the ids of parameters to the places of their shards.

    ``shards``: by the parameter's id: itself, and first and last, exclusive, of its elements that this rank keeps.
    Raises UsageError for a parameter that the model's sharded state dict doesn't have, or has in another order.
    """
    found: dict[int, list[Place]] = {}
    for parameter, whole in _sharded(chunks):
        if id(parameter) not in shards or id(parameter) in found:
            continue
        _, first, last = shards[id(parameter)]
        found[id(parameter)] = list(_runs(parameter, whole, first, last))
    if len(found) < len(shards):
        shape = next(list(parameter.shape) for key, (parameter, _, _) in shards.items() if key not in found)
        raise UsageError(
            f"a parameter of shape {shape} is trained, and is not in the sharded_state_dict() of the model: Rekindle "
            "can't tell which part of which tensor it is"
        )
    return found


def unplaced(chunks: Iterable[Any], trained: set[int]) -> list[tuple[dict[str, Any], str, list[Place]]]:
    """Lists all other tensors of the model with their places: buffers, and parameters that no optimizer trains.

    Each is named by its module's dictionary and its key there, so that one that takes its place is found, too.
    """
    found: dict[int, tuple[dict[str, Any], str, list[Place]]] = {}
    owners = {
        id(tensor): (kept, name)
        for chunk in chunks
        for module in chunk.modules()
        for kept in (module._parameters, module._buffers)
        for name, tensor in kept.items()
    }
    for tensor, whole in _sharded(chunks):
        if id(tensor) not in trained and id(tensor) not in found and id(tensor) in owners:
            found[id(tensor)] = *owners[id(tensor)], list(_runs(tensor, whole, 0, tensor.numel()))
    return list(found.values())


def _sharded(chunks: Iterable[Any]) -> Iterator[tuple[torch.Tensor, list[Any]]]:
    """Yields each tensor of the model chunks with Megatron's descriptions of its boxes."""
    for chunk in chunks:
        for entry in _dict_utils.nested_values(chunk.sharded_state_dict(metadata=dict(_METADATA))):
            if isinstance(entry, _mapping.ShardedTensorFactory):
                yield entry.data, list(_dict_utils.nested_values(entry.build()))
            elif isinstance(entry, _mapping.ShardedTensor):
                yield entry.data, [entry]


def _runs(parameter: torch.Tensor, whole: list[Any], first: int, last: int) -> Iterator[Place]:
    """Yields the places of the elements ``first`` to ``last``, exclusive, of a parameter of one or more boxes."""
    for part in whole:
        if part.prepend_axis_num or not (part.data.is_contiguous() and parameter.is_contiguous()):
            raise UsageError(
                f"{part.key}: its elements lie in another order than in Megatron's checkpoints, as those of experts "
                "that are grouped without Transformer Engine do: Rekindle can't place them; use SequentialMLP or "
                "TEGroupedMLP"
            )
        before = (part.data.data_ptr() - parameter.data_ptr()) // parameter.element_size()
        low, high = max(first, before), min(last, before + part.data.numel())
        if low < high:
            box = Box(tuple(part.global_offset), tuple(part.local_shape))
            yield Place(part.key, tuple(part.global_shape), box, low - before, high - before, low - first)


def agree(places: Iterable[Place], problem: str = "") -> dict[bytes, tuple[int, ...]]:
    """Maps the digest of each run to all ranks that hold it. A collective of all ranks.

    This finds the copies that ``num_distributed_optimizer_instances`` makes, and those of tensor-parallel ranks, as
    they are: not by the sizes of groups, but by the elements. Raises UsageError on all ranks if one has a problem.
    """
    mine = sorted({place.digest for place in places})
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, (problem, mine))
    for rank, (theirs, _) in enumerate(every):
        if theirs:
            raise UsageError(f"rank {rank}: {theirs}")
    holders: dict[bytes, list[int]] = {digest: [] for digest in mine}
    for rank, (_, theirs) in enumerate(every):
        for digest in holders.keys() & set(theirs):
            holders[digest].append(rank)
    return {digest: tuple(ranks) for digest, ranks in holders.items()}


def with_ranks(places: list[Place], holders: dict[bytes, tuple[int, ...]]) -> list[Place]:
    """Returns the places with all ranks that hold the same."""
    return [replace(one, ranks=holders[one.digest]) for one in places]
