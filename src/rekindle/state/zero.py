"""torch's ZeroRedundancyOptimizer as an entry of the state: this rank's part, named as if nothing were sharded."""

from __future__ import annotations

import sys
from typing import Any

import torch

from rekindle.errors import StateMismatchError

__all__ = ["ZeroState", "is_zero"]


def is_zero(entry: Any) -> bool:
    module = sys.modules.get("torch.distributed.optim.zero_redundancy_optimizer")  # else it can't be one
    return module is not None and isinstance(entry, module.ZeroRedundancyOptimizer)


class ZeroState:
    """What this rank keeps of the optimizer's state. No collective, unlike the optimizer's own ``state_dict()``.

    Parameters are numbered over all ranks, so that whoever holds a copy of one calls it the same.
    """

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Of all parameters: ``step()`` changes those of other ranks too, by what these send."""
        groups: list[dict[str, Any]] = self.optimizer.param_groups
        return groups

    @property
    def state(self) -> dict[torch.Tensor, dict[str, Any]]:
        kept: dict[torch.Tensor, dict[str, Any]] = self.optimizer.optim.state
        return kept

    def _numbers(self) -> dict[int, int]:
        every = [p for group in self.param_groups for p in group["params"]]
        return {id(parameter): number for number, parameter in enumerate(every)}

    def state_dict(self) -> dict[str, Any]:
        numbers = self._numbers()
        groups = [{key: value for key, value in group.items() if key != "params"} for group in self.param_groups]
        return {"state": {numbers[id(p)]: kept for p, kept in self.state.items()}, "param_groups": groups}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raises StateMismatchError when the parameters are shared out differently now."""
        every = [p for group in self.param_groups for p in group["params"]]
        own = {id(p) for group in self.optimizer.optim.param_groups for p in group["params"]}
        wanted = [number for number, p in enumerate(every) if id(p) in own]
        if state["state"] and sorted(state["state"]) != wanted:
            raise StateMismatchError("the optimizer's parameters were shared out among other ranks when it was saved")
        self.state.clear()
        for number, kept in state["state"].items():
            parameter = every[number]
            self.state[parameter] = {
                key: value.to(parameter.device) if isinstance(value, torch.Tensor) and value.dim() else value
                for key, value in kept.items()
            }
        for group, values in zip(self.param_groups, state["param_groups"], strict=True):
            group.update(values)
        self.optimizer._sync_param_groups(self.optimizer.param_groups, self.optimizer.optim.param_groups)
