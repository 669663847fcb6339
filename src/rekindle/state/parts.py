"""What this process holds of a tensor, whatever kind of tensor it is: which boxes, where, and who holds the same."""

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
    """A part of a tensor that lies, flattened, in a piece of ``base``, as FullyShardedDataParallel keeps them."""

    base: torch.Tensor
    """One dimension; others' parts may lie in it too."""
    start: int
    """Where this one's first element is in ``base``."""
    shape: tuple[int, ...]
    """Of the whole tensor."""
    first: int
    last: int
    """Which of the whole tensor's elements, counted row by row, these are; ``last`` is exclusive."""
    counter: torch.Tensor
    """The tensor whose version counts what is written to this one."""
    ranks: tuple[int, ...] = ()
    """All ranks that hold the same part."""

    @property
    def pieces(self) -> list[tuple[Box, torch.Tensor]]:
        found, at = [], self.start
        for box in boxes_of_range(self.shape, self.first, self.last):
            found.append((box, self.base.detach()[at : at + box.volume].view(box.sizes)))
            at += box.volume
        return found


Leaf = torch.Tensor | FlatPart


def is_leaf(value: object) -> bool:
    return isinstance(value, (torch.Tensor, FlatPart))


def boxes_of_range(shape: Sequence[int], first: int, last: int) -> list[Box]:
    """The elements ``first`` to ``last``, exclusive, of a tensor, counted row by row, as boxes in their order."""
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
    """What this process holds of one tensor."""

    shape: tuple[int, ...]
    """Of the whole tensor."""
    dtype: str
    pieces: list[tuple[Box, torch.Tensor]]
    """Plain tensors, and which box of the whole each one is."""
    counter: torch.Tensor
    """The tensor whose version counts what is written."""
    ranks: tuple[int, ...] = ()
    """All ranks that hold the same boxes, as far as the tensor itself tells; empty if it doesn't."""
    sharded: bool = False
    """Whether the tensor says of itself that it is a part of one that all ranks have together."""
    family: tuple[int, ...] = ()
    """All ranks that hold a part of the same tensor, as far as the tensor itself tells."""
    place: tuple[Any, ...] = field(default=(), compare=False)
    """Equal for tied tensors."""


def local_tensor(leaf: Leaf) -> torch.Tensor:
    """The plain tensor that this process's part lies in."""
    if isinstance(leaf, FlatPart):
        return leaf.base
    return leaf._local_tensor if is_dtensor(leaf) else leaf


def is_dtensor(value: object) -> TypeGuard[Any]:
    module = sys.modules.get("torch.distributed.tensor")  # else it can't be one; to import it takes a second
    return module is not None and isinstance(value, module.DTensor)


def replicate_like(whole: torch.Tensor, like: Any) -> torch.Tensor:
    """A DTensor that is ``whole`` on each rank of the mesh of ``like``, another one."""
    module = sys.modules["torch.distributed.tensor"]
    placements = [module.Replicate()] * like.device_mesh.ndim
    made: torch.Tensor = module.DTensor.from_local(whole, like.device_mesh, placements, run_check=False)
    return made


def dtype_name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def local_parts(leaf: Leaf, path: str) -> LocalParts:
    """Raises UnsupportedValueError, naming ``path``, for what can't be saved."""
    local = local_tensor(leaf)
    _check_kind(local, path)
    if isinstance(leaf, FlatPart):
        at = (_place(local), leaf.start, leaf.shape, leaf.first, leaf.last)
        place = at if leaf.first < leaf.last else (id(leaf),)  # nothing of it is here: it is like no other
        return LocalParts(leaf.shape, dtype_name(local), leaf.pieces, leaf.counter, leaf.ranks, True, (), place)
    if is_dtensor(leaf):
        return _hold_dtensor(leaf, local, path)
    shape = tuple(leaf.shape)
    whole = Box((0,) * len(shape), shape)
    return LocalParts(shape, dtype_name(leaf), [(whole, leaf.detach())], leaf, place=_place(leaf))


def _hold_dtensor(tensor: Any, local: torch.Tensor, path: str) -> LocalParts:
    if any(placement.is_partial() for placement in tensor.placements):
        raise UnsupportedValueError(f"{path}: is a partial sum, {tensor.placements}: redistribute it before saving")
    mesh, coordinate = tensor.device_mesh, tensor.device_mesh.get_coordinate()
    shape = tuple(tensor.shape)
    if coordinate is None:  # a mesh that this rank is no part of
        return LocalParts(shape, dtype_name(local), [], tensor, (), True, (), _place(local))
    alike = tuple(
        slice(None) if placement.is_replicate() else at
        for placement, at in zip(tensor.placements, coordinate, strict=True)
    )
    ranks = mesh.mesh[alike].flatten().tolist()
    chunks = tensor.__create_chunk_list__()
    if len(chunks) != 1 or tuple(chunks[0].sizes) != tuple(local.shape):
        raise UnsupportedValueError(f"{path}: its part on this rank is not one box, {tensor.placements}")
    box = Box(tuple(chunks[0].offsets), tuple(chunks[0].sizes))
    pieces = [(box, local.detach())] if box.volume else []
    family = tuple(sorted(mesh.mesh.flatten().tolist()))
    return LocalParts(
        shape, dtype_name(local), pieces, tensor, tuple(sorted(ranks)), True, family, (_place(local), box)
    )


def _place(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Equal for tied tensors. Lazily conjugated or negated ones have other values in the same bytes."""
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
