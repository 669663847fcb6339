"""Saves and restores what Megatron-core keeps beside weights and optimizers: random states, counters, schedules."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Sequence
from typing import Any

import torch

from rekindle.state.rng import state_bytes, state_tensor

__all__ = ["load_surroundings", "surroundings"]

log = logging.getLogger("rekindle")

_parallel: Any = importlib.import_module("megatron.core.parallel_state")
_random: Any = importlib.import_module("megatron.core.tensor_parallel.random")
_rerun: Any = importlib.import_module("megatron.core.rerun_state_machine")
_microbatches: Any = importlib.import_module("megatron.core.num_microbatches_calculator")

_COUNTERS = (
    *("iteration", "consumed_train_samples", "skipped_train_samples", "consumed_valid_samples"),
    "num_floating_point_operations_so_far",
)
"""Attributes of Megatron-LM's arguments that count what the training has done."""
_RERUN = ("current_iteration", "large_value_counts", "max_values")
"""Attributes of the rerun state machine by which it judges later steps. The others belong to a step that is rerun."""


def surroundings(optimizers: Sequence[Any], schedule: Any, args: Any) -> dict[str, Any]:
    """Returns all of it as values of this rank. Reads, and changes nothing."""
    machine = _rerun._GLOBAL_RERUN_STATE_MACHINE
    return {
        "layout": _layout(),
        "tracker": {name: _state_of(state) for name, state in _random.get_cuda_rng_tracker().get_states().items()},
        "options": [options for optimizer in optimizers for options in _options(optimizer.optimizer)],
        "scaler": [optimizer.grad_scaler.state_dict() for optimizer in optimizers if optimizer.grad_scaler],
        "schedule": schedule.state_dict() if schedule is not None else None,
        "counters": {name: getattr(args, name) for name in _COUNTERS if hasattr(args, name)},
        "rerun": {name: getattr(machine, name) for name in _RERUN if hasattr(machine, name)},
    }


def load_surroundings(saved: dict[str, Any], optimizers: Sequence[Any], schedule: Any, args: Any) -> None:
    """Sets all of it to what was saved."""
    by_group = {_group_key(options): options for options in saved["options"]}
    for optimizer in optimizers:
        _load_options(optimizer.optimizer, by_group)
    scaled = [optimizer for optimizer in optimizers if optimizer.grad_scaler]
    for optimizer, state in zip(scaled, saved["scaler"], strict=False):
        optimizer.grad_scaler.load_state_dict(state)
    if schedule is not None and saved["schedule"] is not None:
        schedule.num_steps = 0  # it adds those that it is given
        schedule.load_state_dict(saved["schedule"])
    for name, value in saved["counters"].items():
        setattr(args, name, value)
    if _microbatches._GLOBAL_NUM_MICROBATCHES_CALCULATOR is not None and "consumed_train_samples" in saved["counters"]:
        _microbatches.update_num_microbatches(saved["counters"]["consumed_train_samples"], verbose=False)
    machine = _rerun._GLOBAL_RERUN_STATE_MACHINE
    for name, value in saved["rerun"].items() if machine is not None else ():
        setattr(machine, name, value)
    _load_tracker(saved)


# -- the options of optimizers ------------------------------------------------------------------------------------


def _options(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Returns the options of each group, and the number of its updates, which is alike for all of its parameters."""
    found = []
    for group in optimizer.param_groups:
        options = {key: value for key, value in group.items() if key != "params"}
        step = next((optimizer.state[p]["step"] for p in group["params"] if "step" in optimizer.state[p]), None)
        found.append(options | ({} if step is None else {"step": float(step)}))
    return found


def _load_options(optimizer: torch.optim.Optimizer, saved: dict[tuple[Any, ...], dict[str, Any]]) -> None:
    """Sets the options of each group to those of the saved group with the same marks."""
    steps = [options["step"] for options in saved.values() if "step" in options]
    for group in optimizer.param_groups:
        options = dict(saved[_group_key(group)])
        step = options.pop("step", steps[0] if steps else None)
        own = "step" in group
        group.update(options)
        if own:
            group["step"] = int(step)
            continue
        for parameter in group["params"]:
            optimizer.state[parameter]["step"].fill_(step)


def _group_key(group: dict[str, Any]) -> tuple[Any, ...]:
    """Returns the marks by which Megatron knows a group of parameters again."""
    names = ("wd_mult", "lr_mult", "is_expert_parallel", "is_decoupled_lr")
    return tuple(group.get(name, group.get(f"pre_{name}")) for name in names)


# -- random states ------------------------------------------------------------------------------------------------


def _state_of(state: Any) -> bytes:
    return state_bytes(state if isinstance(state, torch.Tensor) else state.get_state())


def _layout() -> dict[str, int]:
    """Returns the sizes on which it depends which rank draws which random numbers."""
    return {
        "tensor": _parallel.get_tensor_model_parallel_world_size(),
        "pipeline": _parallel.get_pipeline_model_parallel_world_size(),
        "context": _parallel.get_context_parallel_world_size(),
        "expert": _parallel.get_expert_model_parallel_world_size(),
        "expert_tensor": _parallel.get_expert_tensor_parallel_world_size(),
        "data": _parallel.get_data_parallel_world_size(),
    }


def _load_tracker(saved: dict[str, Any]) -> None:
    """Sets the states of the random generators for tensor-parallel regions, unless ranks have other parts than then."""
    if saved["layout"] != _layout():
        log.info(
            "the checkpoint was saved by %s, and these ranks are %s: the random states of model-parallel regions are "
            "not restored, as no rank is what another one was",
            saved["layout"],
            _layout(),
        )
        return
    tracker = _random.get_cuda_rng_tracker()
    live = tracker.get_states()
    for name, data in saved["tracker"].items():
        state = state_tensor(data)
        if isinstance(live.get(name), torch.Generator):
            live[name].set_state(state)
        else:
            live[name] = state
    if saved["tracker"]:
        tracker.set_states(live)
