"""Puts what a torchtitan manager is given into entries of a state, without the hooks of its model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from rekindle.state.content import with_extra_state
from rekindle.state.names import canonical_names

__all__ = ["entries_of", "without_hooks"]


def entries_of(states: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Maps torchtitan's keys to the entries of a state, by their names.

    A key that stands for several objects, as with pipeline stages or optimizers of several kinds, has an entry for
    each: "model", "model_1" and so on. Optimizers are the inner ones, whose steps wait for copies.
    """
    several = {"model": [without_hooks(part) for part in states["model"].model], "optimizer": list(states["optimizer"])}
    found = {}
    for key, value in states.items():
        entries = several.get(key, [value] if value is not None else [])
        found[key] = {f"{key}_{number}" if number else key: entry for number, entry in enumerate(entries)}
    return found


def without_hooks(part: torch.nn.Module) -> torch.nn.Module:
    """Returns modules of the same names that hold the parameters and buffers of ``part``, and nothing else.

    The hooks of torchtitan's models make other tensors of a fused weight as it is saved, by a collective: one that
    other ranks don't join would hang the saving of a rank at a fault. A model with extra state is returned as it is.
    """
    if any(True for _ in with_extra_state(part)):
        return part
    names = canonical_names(part)
    hidden = {
        f"{prefix}.{key}" if prefix else key
        for prefix, module in part.named_modules()
        for key in module._non_persistent_buffers_set
    }
    bare = torch.nn.Module()
    for key, parameter in part.named_parameters(remove_duplicate=False):
        home, last = _home(bare, names[key])
        home.register_parameter(last, parameter)
    for key, buffer in part.named_buffers(remove_duplicate=False):
        if key not in hidden:
            home, last = _home(bare, names[key])
            home.register_buffer(last, buffer)
    return bare


def _home(root: torch.nn.Module, name: str) -> tuple[torch.nn.Module, str]:
    """Returns the module that holds what has this name, made if need be, and the name within it."""
    *path, last = name.split(".")
    for step in path:
        if step not in root._modules:
            root.add_module(step, torch.nn.Module())
        root = root.get_submodule(step)
    return root, last
