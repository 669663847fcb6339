"""Parameters that an optimizer of the state trains and nothing in the state holds: a restart would lose them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from rekindle.state.content import Contents
from rekindle.state.parts import Sharded, dtype_name, memory
from rekindle.state.plain import Values
from rekindle.state.tree import Flat, flatten

__all__ = ["describe_missing"]

_SOME = 6
"""Parameters of one group that a message describes."""


def describe_missing(state: Mapping[str, Any]) -> str:
    """Optimizer, group and shape of each parameter that would be lost; empty when there is none.

    Frozen parameters are passed over: no update changes them. What is in a module of the state, or shares memory with
    any tensor of it, is held. An entry with a ``state_dict()`` of its own may keep copies, so it is taken to hold
    whatever has the shape of a tensor in it: a false error would be worse than one that is missed.
    """
    optimizers = {name: entry for name, entry in state.items() if _is_optimizer(entry)}
    modules = [entry for entry in state.values() if isinstance(entry, torch.nn.Module)]
    owned = {id(parameter) for module in modules for parameter in module.parameters()}
    contents = Contents(dict(state))
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
    places, shapes = _held(state, contents)
    problems = []
    for name, found in left.items():
        lost = [(n, p) for n, p in found if _storage(memory(p)) not in places and tuple(p.shape) not in shapes]
        for number in dict.fromkeys(number for number, _ in lost):
            problems.append(f"{name}.param_groups[{number}]: {_listed([p for n, p in lost if n == number])}")
    return "; ".join(problems)


def _is_optimizer(entry: Any) -> bool:
    groups = getattr(entry, "param_groups", None)
    return isinstance(groups, list) and all(isinstance(group, dict) and "params" in group for group in groups)


def _held(state: Mapping[str, Any], contents: Contents) -> tuple[set[tuple[Any, ...]], set[tuple[int, ...]]]:
    """Memory of all tensors outside of optimizers, and the shapes of those that may be copies of parameters."""
    places, shapes = set(), set()
    for entry in state.values():
        if _is_optimizer(entry):
            continue
        flat = Flat()
        flatten(contents.of(entry), flat)
        places |= {_storage(memory(leaf)) for leaf in flat.tensors}
        if not isinstance(entry, (torch.nn.Module, Values)):
            shapes |= {tuple(leaf.shape) for leaf in flat.tensors if not isinstance(leaf, Sharded)}
    return places, shapes


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
