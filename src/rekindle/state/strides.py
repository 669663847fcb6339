"""The order of a tensor's dimensions in memory: what a shard, whose bytes are row-major, says of it beside them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rekindle.format.layout import NEGATABLE, Chunk

__all__ = ["SAME_SIZE", "empty_for", "is_negated", "order_of", "reorder"]

SAME_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}
"""Types to copy elements by: torch can't copy all of its own."""


def order_of(tensor: torch.Tensor) -> tuple[int, ...]:
    """Dimensions as they lie in memory, the outermost first. Empty for row-major, and for a tensor that overlaps
    itself, as an expanded one does. Gaps between elements don't count."""
    shape, strides = tensor.shape, tensor.stride()
    if any(stride == 0 and size > 1 for size, stride in zip(shape, strides, strict=True)):
        return ()
    # Of equal strides those of size 1 come last: so the strides that torch gives to one channel, or one image, do too.
    order = tuple(sorted(range(len(shape)), key=lambda d: (-strides[d], -shape[d])))
    return () if order == tuple(range(len(shape))) else order


def is_negated(tensor: torch.Tensor) -> bool:
    """Whether it is a view that negates what lies in memory, of a dtype that torch makes such views of."""
    return tensor.is_neg() and str(tensor.dtype).removeprefix("torch.") in NEGATABLE


def empty_for(chunk: Chunk, order: Sequence[int], device: torch.device | None = None) -> torch.Tensor:
    """A new tensor for all of what ``chunk`` is a part of. ``order`` is that of its dimensions in memory, as above."""
    shape, dtype = chunk.global_shape, getattr(torch, chunk.dtype)
    made = torch.empty_permuted(shape, tuple(order) or tuple(range(len(shape))), dtype=dtype, device=device)
    made = made.conj() if chunk.conj else made
    return torch._neg_view(made) if chunk.neg else made


def reorder(tensor: torch.Tensor, order: Sequence[int]) -> torch.Tensor:
    """What a row-major tensor holds, brought into this order in its own memory. Takes as much again meanwhile."""
    if not order:
        return tensor
    elements = tensor.view(SAME_SIZE[tensor.element_size()])
    back = sorted(range(len(order)), key=order.__getitem__)
    there = elements.view([tensor.shape[d] for d in order]).permute(back)
    return there.copy_(elements.clone()).view(tensor.dtype)
