"""Describes the parameters of FullyShardedDataParallel (FSDP 1), which flattens, concatenates and cuts them.

Its ``state_dict()`` gathers every parameter from all ranks. This needs no gathering: a rank holds a contiguous run of
each parameter's elements, which is a few boxes of the parameter.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from rekindle.state.parts import FlatPart

__all__ = ["FlatRun", "flat_modules", "is_flat", "flat_runs", "tied_names"]


@dataclass(frozen=True)
class FlatRun:
    """Locates a parameter's elements ``first`` to ``last``, exclusive, in a flat tensor: they begin at ``start``."""

    name: str
    """Name of the parameter in the bare model."""
    shape: tuple[int, ...]
    start: int
    first: int
    last: int
    ranks: tuple[int, ...]
    """All ranks that hold the same elements."""

    def of(self, base: torch.Tensor, counter: torch.Tensor) -> FlatPart:
        """Returns the part of ``base`` that holds these elements. Writes to it change the version of ``counter``."""
        return FlatPart(base, self.start, self.shape, self.first, self.last, counter, self.ranks)


def is_flat(module: Any) -> bool:
    """True if the module, or a part of it, is FullyShardedDataParallel."""
    return isinstance(module, torch.nn.Module) and next(flat_modules(module), None) is not None


def flat_modules(module: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    """Yields name and module of each part that keeps flattened parameters."""
    kind = getattr(sys.modules.get("torch.distributed.fsdp"), "FullyShardedDataParallel", None)
    if kind is not None:
        for name, part in module.named_modules():
            if isinstance(part, kind) and part._handle is not None:
                yield name, part


def flat_runs(part: Any, prefix: str) -> tuple[torch.Tensor, list[FlatRun]]:
    """Returns the flat tensor of one such part, and the parameters in it.

    ``prefix`` is the part's own name and a dot, or empty.
    """
    handle, flat = part._handle, part._handle.flat_param
    base = getattr(flat, "_local_shard", flat.data)  # set at its first use
    ranks = _alike(part, handle)
    found, at = [], 0
    for name, shape, info in zip(flat._fqns, flat._shapes, flat._shard_param_infos, strict=True):
        if info.in_shard:
            at, first, last = info.offset_in_shard, info.intra_param_start_idx, info.intra_param_end_idx + 1
        else:
            first = last = 0
        found.append(FlatRun(prefix + name, tuple(shape), at, first, last, ranks))
    return base, found


def tied_names(flat: Any) -> list[tuple[str, str]]:
    """Returns (further name, first name) of the parameters of a flat tensor that have several names."""
    return [
        (_dotted(info.module_name, info.param_name), _dotted(info.prim_module_name, info.prim_param_name))
        for info in flat._shared_param_infos
    ]


def _dotted(module: str, name: str) -> str:
    return f"{module}.{name}" if module else name


def _alike(part: Any, handle: Any) -> tuple[int, ...]:
    """Returns the ranks that hold the same elements."""
    if not handle.uses_sharded_strategy:
        return tuple(sorted(dist.get_process_group_ranks(part.process_group)))
    between = getattr(part, "_inter_node_pg", None)
    return tuple(sorted(dist.get_process_group_ranks(between))) if between is not None else (dist.get_rank(),)
