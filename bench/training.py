"""Provides the state that every contender saves, a small GPT of the bytes asked for, and the cost of copying it."""

from __future__ import annotations

import ctypes
import statistics
import time
from typing import Any

import torch
import xxhash

__all__ = ["Copies", "Training"]

_LAYERS = 12
_LENGTH = 32
"""Tokens in a sequence."""
_PIECE = 256 << 20
"""Bytes that copies are measured with, again and again: far beyond caches, and no second state in memory."""


class _GPT(torch.nn.Module):
    """Blocks between an embedding and its transpose, so that every parameter gets a gradient in every step."""

    def __init__(self, rows: int, width: int) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(rows, width)
        self.blocks = torch.nn.Sequential(
            *(torch.nn.TransformerEncoderLayer(width, 8, 4 * width, batch_first=True) for _ in range(_LAYERS))
        )

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.blocks(self.embedding(tokens)) @ self.embedding.weight.T


class Training:
    """A GPT and AdamW, whose parameters and two moments take ``size`` bytes; ``batch`` sequences in each step."""

    def __init__(self, size: int, batch: int = 1) -> None:
        parameters = size // 12  # float32: the parameter and two moments
        width = 8
        while _LAYERS * (12 * (width + 8) ** 2 + 13 * (width + 8)) <= 0.75 * parameters:
            width += 8
        rows = max(2, (parameters - _LAYERS * (12 * width**2 + 13 * width)) // width)
        self.model = _GPT(rows, width)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self._rows, self.batch = rows, batch

    def work(self) -> float:
        """Forward and backward of a step, on new data. Seconds."""
        began = time.perf_counter()
        tokens = torch.randint(self._rows, (self.batch, _LENGTH + 1))
        self.optimizer.zero_grad()
        found = self.model(tokens[:, :-1])
        torch.nn.functional.cross_entropy(found.flatten(0, 1), tokens[:, 1:].flatten()).backward()
        return time.perf_counter() - began

    def update(self) -> float:
        """Change all of the state. Seconds that others made the update wait, in hooks on the optimizer."""
        began = time.perf_counter()
        started = [began]
        # Registered last, so it runs after all hooks that wait.
        handle = self.optimizer.register_step_pre_hook(lambda *_: started.append(time.perf_counter()))
        try:
            self.optimizer.step()
        finally:
            handle.remove()
        return started[-1] - began

    def tensors(self) -> list[torch.Tensor]:
        parameters = list(self.model.parameters())
        state = [value for p in parameters for _, value in sorted(self.optimizer.state.get(p, {}).items())]
        return [t.detach() for t in [*parameters, *state]]

    def nbytes(self) -> int:
        return sum(t.nbytes for t in self.tensors())

    def state_dict(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def fingerprint(self) -> str:
        """Hash of all bytes of the state, taken in place."""
        digest = xxhash.xxh3_128()
        for tensor in self.tensors():
            digest.update((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr()))
        return digest.hexdigest()

    @classmethod
    def calibrate(cls, size: int, seconds: float) -> Training:
        """With the smallest batch, a power of two, whose forward and backward take ``seconds``."""
        training = cls(size)
        training.work()
        training.update()
        while statistics.median(training.work() for _ in range(3)) < seconds and training.batch < 1 << 16:
            training.batch *= 2
        return training


class Copies:
    """The least that securing or loading ``size`` bytes can cost: one copy of as many, by all threads. Seconds."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._from, self._to = (torch.ones(min(size, _PIECE), dtype=torch.uint8) for _ in range(2))

    def _pieces(self) -> list[int]:
        whole, rest = divmod(self._size, len(self._from))
        return [len(self._from)] * whole + [rest] * bool(rest)

    def faulted(self) -> float:
        """Into memory that is already there."""
        samples = []
        for _ in range(3):
            began = time.perf_counter()
            for nbytes in self._pieces():
                self._to[:nbytes].copy_(self._from[:nbytes])
            samples.append(time.perf_counter() - began)
        return statistics.median(samples)

    def fresh(self) -> float:
        """Into memory that the process touches for the first time."""
        seconds = 0.0
        for nbytes in self._pieces():
            began = time.perf_counter()
            copy = self._from[:nbytes].clone()
            seconds += time.perf_counter() - began
            del copy  # back to the kernel: the allocator keeps nothing of this size
        return seconds
