"""What a tensor is to autograd, where loading makes it anew: a parameter, or one that requires gradients."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.nn import Parameter

from rekindle.format.layout import Chunk
from rekindle.state.parts import Leaf

__all__ = ["Trait", "again", "trait_of"]


class Trait(NamedTuple):
    """The fields of a chunk that tell of it."""

    parameter: bool = False
    requires_grad: bool = False


def trait_of(leaf: Leaf) -> Trait:
    if not isinstance(leaf, torch.Tensor):
        return Trait()
    return Trait(isinstance(leaf, Parameter), leaf.requires_grad)


def again(tensor: torch.Tensor, chunk: Chunk) -> torch.Tensor:
    """What was saved, in the memory of ``tensor``: that one itself where nothing is to be said of it."""
    if trait_of(tensor) == (chunk.parameter, chunk.requires_grad):
        return tensor
    if chunk.parameter:
        return Parameter(tensor.detach(), requires_grad=chunk.requires_grad)
    return tensor.detach().requires_grad_(chunk.requires_grad)
