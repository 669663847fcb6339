"""What a tensor is to autograd, where loading makes it anew: a parameter, or one that requires gradients."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.nn import Parameter

from rekindle.format.layout import Chunk
from rekindle.state.parts import Leaf

__all__ = ["Traits", "with_traits", "traits_of"]


class Traits(NamedTuple):
    """The fields of a chunk that tell of it."""

    parameter: bool = False
    requires_grad: bool = False


def traits_of(leaf: Leaf) -> Traits:
    if not isinstance(leaf, torch.Tensor):
        return Traits()
    return Traits(isinstance(leaf, Parameter), leaf.requires_grad)


def with_traits(tensor: torch.Tensor, chunk: Chunk) -> torch.Tensor:
    """What was saved, in the memory of ``tensor``: that one itself where nothing is to be said of it."""
    if traits_of(tensor) == (chunk.parameter, chunk.requires_grad):
        return tensor
    if chunk.parameter:
        return Parameter(tensor.detach(), requires_grad=chunk.requires_grad)
    return tensor.detach().requires_grad_(chunk.requires_grad)
