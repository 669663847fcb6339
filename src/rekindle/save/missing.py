"""Finds parameters that an optimizer in the state trains and nothing in it holds: a restart would lose them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from rekindle.state.codec import is_numpy
from rekindle.state.content import StateContent
from rekindle.state.parts import FlatPart, dtype_name, local_tensor
from rekindle.state.tree import FlatState, flatten
from rekindle.state.values import Values

__all__ = ["describe_missing"]

_SOME = 6
"""Parameters of one group that a message describes."""


def describe_missing(state: Mapping[str, Any]) -> str:
    """Describes each parameter that would be lost by optimizer, group and shape; empty when there is none.

    Frozen parameters are passed over: no update changes them. What is in a module of the state, or shares memory with
    any tensor of it, is held. An entry with a ``state_dict()`` of its own may keep copies, so it is taken to hold
    whatever has the shape of a tensor or NumPy array in it, and everything if such entries have as many elements, as
    flat vectors do: a false error would be worse than one that is missed.
    """
    optimizers = {name: entry for name, entry in state.items() if _is_optimizer(entry)}
    modules = [entry for entry in state.values() if isinstance(entry, torch.nn.Module)]
    owned = {id(parameter) for module in modules for parameter in module.parameters()}
    contents = StateContent(dict(state))
    left = {
        name: [
            (number, parameter)
            for number, group in enumerate(entry.param_groups)
            for parameter in group["params"]
            if parameter.requires_grad and id(parameter) not in owned and contents.runs(parameter) is None
        ]
        for name, entry in optimizers.items()
    }
    if not any(left.values()):
        return ""
    places, copies = _held(state, contents)
    shapes = {tuple(copy.shape) for copy in copies}
    left = {name: [(n, p) for n, p in found if _storage(local_tensor(p)) not in places] for name, found in left.items()}
    wanted = {id(p): p.numel() for found in left.values() for _, p in found}
    if sum(wanted.values()) <= sum(math.prod(copy.shape) for copy in copies if _is_float(copy)):
        return ""
    problems = []
    for name, found in left.items():
        lost = [(n, p) for n, p in found if tuple(p.shape) not in shapes]
        for number in dict.fromkeys(number for number, _ in lost):
            problems.append(f"{name}.param_groups[{number}]: {_listed([p for n, p in lost if n == number])}")
    return "; ".join(problems)


def _is_optimizer(entry: Any) -> bool:
    groups = getattr(entry, "param_groups", None)
    return isinstance(groups, list) and all(isinstance(group, dict) and "params" in group for group in groups)


def _held(state: Mapping[str, Any], contents: StateContent) -> tuple[set[tuple[Any, ...]], list[Any]]:
    """Returns the memory of all tensors outside of optimizers, and the tensors and arrays that may copy parameters."""
    places, copies = set(), []
    for entry in state.values():
        if _is_optimizer(entry):
            continue
        flat = FlatState()
        flatten(contents.of(entry), flat)
        places |= {_storage(local_tensor(leaf)) for leaf in flat.tensors}
        if not isinstance(entry, (torch.nn.Module, Values)):
            copies += [leaf for leaf in flat.tensors if not isinstance(leaf, FlatPart)]
            copies += [value for value in flat.values if is_numpy(value)]
    return places, copies


def _is_float(copy: Any) -> bool:
    """Returns True for weights, False for counters and a generator's bytes."""
    if isinstance(copy, torch.Tensor):
        return copy.is_floating_point() or copy.is_complex()
    return copy.dtype.kind in "fc"


def _storage(tensor: torch.Tensor) -> tuple[Any, ...]:
    try:
        address = tensor.untyped_storage().data_ptr()
    except (NotImplementedError, RuntimeError):  # sparse, meta and other kinds without memory of their own
        address = 0
    return (tensor.device, address) if address else (id(tensor),)


def _listed(parameters: list[torch.Tensor]) -> str:
    some = [f"{dtype_name(p)}{list(p.shape)}" for p in parameters[:_SOME]]
    more = len(parameters) - len(some)
    return ", ".join(some) + (f" and {more} more" if more else "")
