"""Trains on a device: a network that keeps it busy, and an update whose every result is known."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["Counting", "Training", "counting_state"]

_LAYERS = 24


class Training:
    """A stack of linear layers with AdamW in float32 on the device, and batches that keep it busy."""

    def __init__(self, size: int, rows: int) -> None:
        width = max(64, int((size / 12 / _LAYERS) ** 0.5) // 64 * 64)  # the parameter and two moments, 4 bytes each
        layers = (torch.nn.Linear(width, width, device="cuda") for _ in range(_LAYERS))
        self.model = torch.nn.Sequential(*(part for layer in layers for part in (layer, torch.nn.GELU())))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self.batch = torch.randn(rows, width, device="cuda")
        self.update()

    @property
    def state(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer}

    def update(self) -> None:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = self.model(self.batch).float().square().mean()
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        self.optimizer.step()

    @property
    def nbytes(self) -> int:
        moments = (value for state in self.optimizer.state.values() for value in state.values())
        return sum(p.nbytes for p in self.model.parameters()) + sum(value.nbytes for value in moments)


class Counting(torch.optim.Optimizer):
    """Adds 1 to every parameter, so that a state tells its step, and one torn by an update tells that."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})
        self.amid: Callable[[], object] | None = None
        """Called once, when half of the parameters have been updated."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        parameters = self.param_groups[0]["params"]
        for index, parameter in enumerate(parameters):
            if index == len(parameters) // 2 and self.amid is not None:
                amid, self.amid = self.amid, None
                amid()
            parameter.add_(1)


def counting_state(size: int, pieces: int = 64) -> tuple[torch.nn.ParameterList, Counting]:
    """Returns ``size`` bytes of parameters on the device, all of them 0, and their optimizer."""
    elements = max(size // pieces // 4, 1)
    parameters = torch.nn.ParameterList(torch.zeros(elements, device="cuda") for _ in range(pieces))
    return parameters, Counting(parameters.parameters())
