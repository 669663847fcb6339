"""Training on the fake device: the host is ahead, and each update is work that the device does later."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tests.devices.fake import FakeBackend


class DeviceOptimizer(torch.optim.Optimizer):
    """Adds to each parameter and its moment on the device, and counts on the host, as Adam does."""

    def __init__(self, params: Any, device: FakeBackend) -> None:
        super().__init__(params, {"lr": 1.0})
        self._device = device
        for parameter in self.param_groups[0]["params"]:
            moment = torch.zeros_like(parameter)
            device.own(moment)
            self.state[parameter] = {"step": torch.zeros(()), "moment": moment}

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            state["step"] += 1
            moment = state["moment"]
            self._device.launch(lambda p=parameter, m=moment: add(p, m), parameter, moment)  # type: ignore[misc]


def add(parameter: torch.Tensor, moment: torch.Tensor) -> None:
    moment.data.add_(1.0)
    parameter.data.add_(moment.data)


class Training:
    """Parameters, a counter in a buffer and an optimizer, all on the device. At step n each value follows from n."""

    def __init__(self, device: FakeBackend, size: int = 100_000, layers: int = 1, buffer: bool = True) -> None:
        self.device, self._buffer = device, buffer
        self.model = torch.nn.Module()
        self.model.weight = torch.nn.Parameter(torch.zeros(size))
        self.model.register_buffer("seen", torch.zeros(64), persistent=buffer)
        device.own(self.model.weight, self.model.seen)
        for number in range(1, layers):
            layer = torch.nn.Parameter(torch.zeros(size))
            self.model.register_parameter(f"weight{number}", layer)
            device.own(layer)
        self.optimizer = DeviceOptimizer(self.model.parameters(), device)

    @property
    def state(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer}

    def update(self) -> None:
        """Queues a step: the forward pass, then the update."""
        self.forward()
        self.optimizer.step()

    def forward(self) -> None:
        """Queues a forward pass, which counts in the buffer."""
        seen = self.model.seen
        self.device.launch(lambda: seen.data.add_(1.0), seen)

    def expected(self, step: int) -> dict[str, float]:
        """Values of all elements of each tensor after ``step`` updates."""
        weights = {f"model.{name}": step * (step + 1) / 2 for name, _ in self.model.named_parameters()}
        seen = {"model.seen": float(step)} if self._buffer else {}
        return {**weights, **seen, "moment": float(step)}
