"""Records and restores the order of a tensor's dimensions in memory. The bytes of a shard are always row-major."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rekindle.format.layout import NEGATABLE, Chunk

__all__ = ["SAME_SIZE", "empty_for", "is_negated", "order_of", "reorder"]

SAME_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}
"""Maps bytes of an element to a dtype for copies: torch can't copy all of its dtypes."""


def order_of(tensor: torch.Tensor) -> tuple[int, ...]:
    """Returns the dimensions as they lie in memory, the outermost first; gaps between elements don't count.

    Empty for row-major, and for a tensor that overlaps itself, as an expanded one does.
    """
    shape, strides = tensor.shape, tensor.stride()
    if len(shape) < 2:
        return ()
    if any(stride == 0 and size > 1 for size, stride in zip(shape, strides, strict=True)):
        return ()
    # With equal strides a dimension of size 1 comes last: its stride is arbitrary, as for one channel or one image.
    order = tuple(sorted(range(len(shape)), key=lambda d: (-strides[d], -shape[d])))
    return () if order == tuple(range(len(shape))) else order


def is_negated(tensor: torch.Tensor) -> bool:
    """True if the tensor is a negating view, of a dtype of which torch can make one again."""
    return tensor.is_neg() and str(tensor.dtype).removeprefix("torch.") in NEGATABLE


def empty_for(chunk: Chunk, order: Sequence[int], device: torch.device | str = "cpu") -> torch.Tensor:
    """Returns a new tensor of the global shape of ``chunk``, its dimensions in memory in this ``order``."""
    shape, dtype = chunk.global_shape, getattr(torch, chunk.dtype)
    made = torch.empty_permuted(shape, tuple(order) or tuple(range(len(shape))), dtype=dtype, device=device)
    made = made.conj() if chunk.conj else made
    return torch._neg_view(made) if chunk.neg else made


def reorder(tensor: torch.Tensor, order: Sequence[int]) -> torch.Tensor:
    """Rearranges a row-major tensor to this order in its own memory. Needs as much memory again meanwhile."""
    if not order:
        return tensor
    elements = tensor.view(SAME_SIZE[tensor.element_size()])
    back = sorted(range(len(order)), key=order.__getitem__)
    there = elements.view([tensor.shape[d] for d in order]).permute(back)
    return there.copy_(elements.clone()).view(tensor.dtype)
