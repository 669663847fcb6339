"""Describes the boxes that this process holds of a tensor of any kind, and the ranks that hold the same."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeGuard

import torch
from torch.nn.parameter import is_lazy

from rekindle.errors import UnsupportedValueError
from rekindle.format.boxes import Box
from rekindle.format.layout import DTYPES

__all__ = [
    "LocalParts",
    "Leaf",
    "FlatPart",
    "boxes_of_range",
    "dtype_name",
    "local_parts",
    "is_dtensor",
    "is_leaf",
    "local_tensor",
    "replicate_like",
]


@dataclass(eq=False)
class FlatPart:
    """Describes a part of a tensor that lies flattened in ``base``, as FullyShardedDataParallel keeps it."""

    base: torch.Tensor
    """Tensor of one dimension, which may hold parts of other tensors too."""
    start: int
    """Index of the part's first element in ``base``."""
    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    first: int
    """First element of the part among those of ``box``, counted row by row."""
    last: int
    """First element after the part, counted alike."""
    counter: torch.Tensor
    """Tensor whose version counter changes at each write to the part."""
    ranks: tuple[int, ...] = ()
    """All ranks that hold the same part."""
    box: Box | None = None
    """Box of the whole tensor that is cut into such parts; None for all of it."""

    @property
    def pieces(self) -> list[tuple[Box, torch.Tensor]]:
        """Boxes of the part, and views of ``base`` that hold them."""
        found, at = [], self.start
        corner, sizes = self.box or Box((0,) * len(self.shape), self.shape)
        for inner in boxes_of_range(sizes, self.first, self.last):
            box = Box(tuple(a + b for a, b in zip(corner, inner.offsets, strict=True)), inner.sizes)
            found.append((box, self.base.detach()[at : at + box.volume].view(box.sizes)))
            at += box.volume
        return found


Leaf = torch.Tensor | FlatPart
"""Tensor in a state."""


def is_leaf(value: object) -> bool:
    """True if a state's value is a tensor, or a part of one."""
    return isinstance(value, (torch.Tensor, FlatPart))


def boxes_of_range(shape: Sequence[int], first: int, last: int) -> list[Box]:
    """Returns the elements ``first`` to ``last``, exclusive and counted row by row, as boxes in their order."""
    if first >= last:
        return []
    if not shape:
        return [Box((), ())]
    row = math.prod(shape[1:])
    top, bottom = -(-first // row), last // row  # whole rows
    if top > bottom:
        return _in_row(shape, top - 1, first, last)
    found = _in_row(shape, top - 1, first, top * row)
    if top < bottom:
        inner = tuple(shape[1:])
        found.append(Box((top, *(0 for _ in inner)), (bottom - top, *inner)))
    return found + _in_row(shape, bottom, bottom * row, last)


def _in_row(shape: Sequence[int], row: int, first: int, last: int) -> list[Box]:
    before = row * math.prod(shape[1:])
    inner = boxes_of_range(shape[1:], first - before, last - before)
    return [Box((row, *box.offsets), (1, *box.sizes)) for box in inner]


@dataclass
class LocalParts:
    """Describes the boxes that this process holds of one tensor."""

    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    dtype: str
    pieces: list[tuple[Box, torch.Tensor]]
    """Boxes of the whole tensor, and the plain tensors that hold them."""
    counter: torch.Tensor
    """Tensor whose version counter changes at each write."""
    ranks: tuple[int, ...] = ()
    """All ranks that hold the same boxes; empty if the tensor itself doesn't tell."""
    sharded: bool = False
    """True if the tensor is a part of one that several ranks hold together."""
    mesh_ranks: tuple[int, ...] = ()
    """All ranks that hold a part of the same tensor; empty if the tensor itself doesn't tell."""
    tie_key: tuple[Any, ...] = field(default=(), compare=False)
    """Key that is equal for tied tensors."""


def local_tensor(leaf: Leaf) -> torch.Tensor:
    """Returns the plain tensor in which this process's part lies."""
    if isinstance(leaf, FlatPart):
        return leaf.base
    return leaf._local_tensor if is_dtensor(leaf) else leaf


def is_dtensor(value: object) -> TypeGuard[Any]:
    """True if the value is a DTensor. Does not import torch's module of it."""
    module = _dtensor_module()
    return module is not None and isinstance(value, module.DTensor)


def replicate_like(whole: torch.Tensor, like: Any) -> torch.Tensor:
    """Returns a DTensor that is ``whole`` on each rank of the mesh of another DTensor, ``like``."""
    module: Any = _dtensor_module()
    placements = [module.Replicate()] * like.device_mesh.ndim
    made: torch.Tensor = module.DTensor.from_local(whole, like.device_mesh, placements, run_check=False)
    return made


def _dtensor_module() -> Any:
    """Returns torch's module of DTensors; None before it is imported, when no tensor can be one.

    Importing it takes a second. In torch 2.4 it has the second name, and the first one is a package without DTensors.
    """
    found = map(sys.modules.get, ("torch.distributed.tensor", "torch.distributed._tensor"))
    return next((module for module in found if hasattr(module, "DTensor")), None)


def dtype_name(tensor: torch.Tensor) -> str:
    """Returns the tensor's dtype as the format writes it."""
    return str(tensor.dtype).removeprefix("torch.")


def local_parts(leaf: Leaf, path: str) -> LocalParts:
    """Returns the boxes that this process holds of a tensor.

    Raises UnsupportedValueError, which names ``path``, for a tensor that can't be saved.
    """
    local = local_tensor(leaf)
    _check_kind(local, path)
    if isinstance(leaf, FlatPart):
        at = (_tie_key(local), leaf.start, leaf.shape, leaf.first, leaf.last)
        key = at if leaf.first < leaf.last else (id(leaf),)  # an empty part, tied to no other
        return LocalParts(
            leaf.shape, dtype_name(local), leaf.pieces, leaf.counter, leaf.ranks, sharded=True, tie_key=key
        )
    if local is not leaf:  # a DTensor
        return _dtensor_parts(leaf, local, path)
    shape = tuple(leaf.shape)
    whole = Box((0,) * len(shape), shape)
    return LocalParts(shape, dtype_name(leaf), [(whole, leaf.detach())], leaf, tie_key=_tie_key(leaf))


def _dtensor_parts(tensor: Any, local: torch.Tensor, path: str) -> LocalParts:
    if any(placement.is_partial() for placement in tensor.placements):
        raise UnsupportedValueError(f"{path}: is a partial sum, {tensor.placements}: redistribute it before saving")
    mesh, coordinate = tensor.device_mesh, tensor.device_mesh.get_coordinate()
    shape = tuple(tensor.shape)
    if coordinate is None:  # this rank is not in the mesh
        return LocalParts(shape, dtype_name(local), [], tensor, sharded=True, tie_key=_tie_key(local))
    alike = tuple(
        slice(None) if placement.is_replicate() else at
        for placement, at in zip(tensor.placements, coordinate, strict=True)
    )
    ranks = mesh.mesh[alike].flatten().tolist()
    box = _box_of(tensor, coordinate)
    if box is None or box.sizes != tuple(local.shape):
        raise UnsupportedValueError(f"{path}: its part on this rank is not one box, {tensor.placements}")
    pieces = [(box, local.detach())] if box.volume else []
    mesh_ranks = tuple(sorted(mesh.mesh.flatten().tolist()))
    return LocalParts(
        shape, dtype_name(local), pieces, tensor, tuple(sorted(ranks)), True, mesh_ranks, (_tie_key(local), box)
    )


def _box_of(tensor: Any, coordinate: Sequence[int]) -> Box | None:
    """Returns the box of a DTensor that this rank holds; None if it is not one box."""
    if hasattr(tensor, "__create_chunk_list__"):
        chunks = tensor.__create_chunk_list__()
        return Box(tuple(chunks[0].offsets), tuple(chunks[0].sizes)) if len(chunks) == 1 else None
    # torch 2.4. It doesn't say in which order a dimension was cut that two mesh dimensions share.
    offsets, sizes = [0] * tensor.ndim, list(tensor.shape)
    cut = [placement.dim % tensor.ndim for placement in tensor.placements if placement.is_shard()]
    if len(set(cut)) < len(cut):
        return None
    for number, placement in enumerate(tensor.placements):
        if placement.is_shard():
            dim = placement.dim % tensor.ndim
            each = -(-sizes[dim] // tensor.device_mesh.size(number))
            offsets[dim] = min(each * coordinate[number], sizes[dim])
            sizes[dim] = min(each, sizes[dim] - offsets[dim])
    return Box(tuple(offsets), tuple(sizes))


def _tie_key(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Returns a key that is equal for tied tensors. Lazily conjugated or negated views differ, as their values do."""
    if not tensor.numel():
        return (id(tensor),)
    flags = tensor.is_conj(), tensor.is_neg()
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device, *flags


def _check_kind(tensor: torch.Tensor, path: str) -> None:
    name = dtype_name(tensor)
    if is_lazy(tensor):
        raise UnsupportedValueError(f"{path}: has no shape yet; run the module once before making a Checkpointer")
    if tensor.is_nested:
        raise UnsupportedValueError(f"{path}: a nested tensor can't be saved: save the tensors that x.unbind() gives")
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) and type(tensor).__torch_dispatch__ is not (
        torch.Tensor.__torch_dispatch__
    ):
        raise UnsupportedValueError(
            f"{path}: a {type(tensor).__name__} can't be saved, only plain tensors and DTensors can: save its parts "
            "in an entry of the state that has a state_dict() of its own"
        )
    if tensor.layout is not torch.strided:
        raise UnsupportedValueError(
            f"{path}: a tensor of layout {tensor.layout} can't be saved: save x.to_dense(), or its values and indices"
        )
    if tensor.is_meta:
        raise UnsupportedValueError(f"{path}: is on the device meta, so it has no values: to_empty() gives it memory")
    if tensor.is_quantized:
        raise UnsupportedValueError(
            f"{path}: a quantized tensor can't be saved: save the model as it is before convert(), or x.int_repr(), "
            "scale and zero point"
        )
    if name not in DTYPES:
        raise UnsupportedValueError(f"{path}: a tensor of dtype {name} can't be saved: save x.view(torch.uint8)")
    if tensor.numel() and not tensor.data_ptr():
        raise UnsupportedValueError(f"{path}: its memory has been freed, as by a sharded model outside of forward()")
