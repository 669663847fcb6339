"""Records and restores two traits of tensors that loading makes anew: being a parameter, and requiring gradients."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.nn import Parameter

from rekindle.format.layout import Chunk
from rekindle.state.parts import Leaf

__all__ = ["Traits", "with_traits", "traits_of"]


class Traits(NamedTuple):
    """Holds the fields of a chunk that matter to autograd."""

    parameter: bool = False
    requires_grad: bool = False


def traits_of(leaf: Leaf) -> Traits:
    """Returns the traits of a tensor; the defaults for a flattened part."""
    if not isinstance(leaf, torch.Tensor):
        return Traits()
    return Traits(isinstance(leaf, Parameter), leaf.requires_grad)


def with_traits(tensor: torch.Tensor, chunk: Chunk) -> torch.Tensor:
    """Returns a tensor with the traits of ``chunk`` in the memory of ``tensor``; itself if it has them already."""
    if traits_of(tensor) == (chunk.parameter, chunk.requires_grad):
        return tensor
    if chunk.parameter:
        return Parameter(tensor.detach(), requires_grad=chunk.requires_grad)
    return tensor.detach().requires_grad_(chunk.requires_grad)
