"""Compares the options of optimizers and schedules in the code with those that a restore brings back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from rekindle.state.zero import ZeroState

__all__ = ["differences", "options_of"]

_SOME = 8
"""Options that one line names."""

_SCHEDULED = {"initial_lr": ("lr",), "max_momentum": ("betas", "momentum")}
"""By an option that only a schedule sets: the options that it changes step by step, and that say nothing of the
code."""

_OF_SCHEDULES = frozenset(
    [
        *("T_0", "T_max", "T_mult", "base_lrs", "cooldown", "end_factor", "eta_min", "factor", "gamma", "max_lrs"),
        *("milestones", "min_lrs", "mode", "patience", "power", "start_factor", "step_size", "threshold"),
        *("total_iters", "total_steps"),
    ]
)
"""Options that torch's schedules are made with, and never change themselves."""


def options_of(state: Mapping[str, Any]) -> dict[str, Any]:
    """Maps paths, such as ``optimizer.param_groups[0].weight_decay``, to values, without those that a schedule
    changes."""
    found: dict[str, Any] = {}
    scheduled = {id(vars(entry).get("optimizer")) for entry in state.values() if isinstance(entry, LRScheduler)}
    for name, entry in state.items():
        if isinstance(entry, (torch.optim.Optimizer, ZeroState)):
            for number, group in enumerate(entry.param_groups):
                changing = {"params"} | {key for mark in _SCHEDULED if mark in group for key in _SCHEDULED[mark]}
                changing |= {"lr"} if id(entry) in scheduled else set()  # ReduceLROnPlateau leaves no mark
                at = f"{name}.param_groups[{number}]"
                found |= {f"{at}.{key}": _plain(value) for key, value in group.items() if key not in changing}
        elif isinstance(entry, LRScheduler):
            found |= {f"{name}.{key}": _plain(vars(entry)[key]) for key in sorted(_OF_SCHEDULES & vars(entry).keys())}
    return found


def differences(code: Mapping[str, Any], restored: Mapping[str, Any]) -> str:
    """Returns ``path: value in code, value restored`` of all options that are in both and differ; empty without any."""
    both = [path for path in code if path in restored and code[path] != restored[path]]
    some = [f"{path}: {code[path]} in code, {restored[path]} restored" for path in both[:_SOME]]
    return "; ".join(some) + (f"; and {len(both) - _SOME} more" if len(both) > _SOME else "")


def _plain(value: Any) -> str:
    """Returns a value as text, which can be compared whatever it is: a list as its tuple, a tensor of one element as
    its number."""
    if isinstance(value, torch.Tensor):
        return repr(value.item()) if value.numel() == 1 and not value.is_meta else f"tensor{list(value.shape)}"
    if isinstance(value, (list, tuple)):
        return f"({', '.join(map(_plain, value))})"
    return repr(value)
