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

    def _tensors(self) -> list[torch.Tensor]:
        parameters = list(self.model.parameters())
        return parameters + [value for p in parameters for _, value in sorted(self.optimizer.state.get(p, {}).items())]

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._tensors())

    def fingerprint(self) -> list[int]:
        """Returns the sum of each tensor's bits, as integers: two states that differ have different ones."""
        return [int(t.detach().view(torch.int32).sum(dtype=torch.int64)) for t in self._tensors()]


class Counting(torch.optim.Optimizer):
    """Adds 1 to every parameter, so that a state tells its step, and one torn by an update tells that.

    It has a counter for each parameter from the start. For an optimizer without state Rekindle reserves memory for two
    more tensors of each parameter's size: three times the bytes of this state, which may not fit.
    """

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter] = {"step": torch.zeros(())}
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
            self.state[parameter]["step"] += 1


def counting_state(size: int, pieces: int = 64, device: str = "cuda") -> tuple[torch.nn.ParameterList, Counting]:
    """Returns ``size`` bytes of parameters on the device, all of them 0, and their optimizer."""
    elements = max(size // pieces // 4, 1)
    parameters = torch.nn.ParameterList(torch.zeros(elements, device=device) for _ in range(pieces))
    return parameters, Counting(parameters.parameters())
