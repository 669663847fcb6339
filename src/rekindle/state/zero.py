"""Describes a ZeroRedundancyOptimizer as an entry of the state: this rank's part, named as if nothing were sharded."""

from __future__ import annotations

import sys
from typing import Any

import torch

__all__ = ["ZeroState", "is_zero", "number_parameters"]


def is_zero(entry: Any) -> bool:
    """True if the entry is a ZeroRedundancyOptimizer. Does not import torch's module of it."""
    module = sys.modules.get("torch.distributed.optim.zero_redundancy_optimizer")  # without it no entry can be one
    return module is not None and isinstance(entry, module.ZeroRedundancyOptimizer)


def number_parameters(groups: list[dict[str, Any]]) -> dict[int, torch.Tensor]:
    """Maps torch's numbers of an optimizer's parameters to them: their places, group after group.

    A parameter that occurs twice has the number of its last place in the first group that has it.
    """
    place: dict[int, tuple[int, torch.Tensor]] = {}
    start = 0
    for group in groups:
        new = {id(p): (number, p) for number, p in enumerate(group["params"], start) if id(p) not in place}
        place |= new
        start += len(group["params"])
    return dict(sorted(place.values(), key=lambda entry: entry[0]))


class ZeroState:
    """Accesses this rank's part of the optimizer's state, without the collective of the optimizer's ``state_dict()``.

    Parameters are numbered over all ranks, as in torch's other optimizers. For one thread at a time.
    """

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Groups of all parameters: ``step()`` updates those of other ranks too, from what these send."""
        groups: list[dict[str, Any]] = self.optimizer.param_groups
        return groups

    @property
    def state(self) -> dict[torch.Tensor, dict[str, Any]]:
        """Optimizer state of the parameters that this rank keeps."""
        kept: dict[torch.Tensor, dict[str, Any]] = self.optimizer.optim.state
        return kept

    @property
    def owned(self) -> set[int]:
        """Ids of the parameters whose state this rank keeps."""
        return {id(p) for group in self.optimizer.optim.param_groups for p in group["params"]}

    def _numbers(self) -> dict[int, int]:
        return {id(p): number for number, p in number_parameters(self.param_groups).items()}

    def state_dict(self) -> dict[str, Any]:
        """Returns this rank's part in the form of torch's optimizers: state and parameters by number."""
        numbers = self._numbers()
        groups = [{**group, "params": [numbers[id(p)] for p in group["params"]]} for group in self.param_groups]
        return {"state": {numbers[id(p)]: kept for p, kept in self.state.items()}, "param_groups": groups}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Loads the state of the parameters that this rank keeps, and ignores that of others."""
        every = number_parameters(self.param_groups)
        owned = self.owned
        self.state.clear()
        for number, kept in state["state"].items():
            parameter = every[number]
            if id(parameter) in owned:
                self.state[parameter] = {
                    key: value.to(parameter.device) if isinstance(value, torch.Tensor) and value.dim() else value
                    for key, value in kept.items()
                }
        for group, values in zip(self.param_groups, state["param_groups"], strict=True):
            group.update({key: value for key, value in values.items() if key != "params"})
        self.optimizer._sync_param_groups(self.optimizer.param_groups, self.optimizer.optim.param_groups)
