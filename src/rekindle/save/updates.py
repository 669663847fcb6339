"""Tells whether an update was made since a restore or a step: a loop that miscounts then tells a step too small."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from rekindle.save.fence import Fence

__all__ = ["Updates"]


class Updates:
    """Counts by the hooks of ``fence``; where no optimizer has one, torch's counters of writes to parameters tell."""

    def __init__(self, state: Mapping[str, Any], fence: Fence) -> None:
        self._state, self._fence = state, fence
        self._told: tuple[int, int] | None = None
        """The newest step that training has told, and the announced updates until then."""
        self.begin()

    def begin(self) -> None:
        """Count from now: the state is that of a complete step."""
        self._seen, self._steps = self._read_counters(), self._fence.steps
        self._told = None
        self._fence.begin()

    def complete(self, n: int) -> None:
        """Count from step ``n`` too, which is complete."""
        self._fence.end_step(n)
        self._told = n, self._fence.steps

    def made_since(self, n: int) -> bool:
        """Returns True if ``n`` was the newest step to be complete, and an update was announced since."""
        return self._told is not None and self._told[0] == n and self._told[1] != self._fence.steps

    def made(self) -> bool:
        """Returns True if an update was made or begun since ``begin``. Writes that torch doesn't count stay unseen."""
        return self._read_counters() != self._seen

    def announced(self) -> bool:
        """Returns True if one of them was announced, with a learning rate: no mere write, as loading weights is."""
        return self._fence.steps != self._steps

    def _read_counters(self) -> list[int]:
        if self._fence.hooked:
            return [self._fence.updates]
        modules = [entry for entry in self._state.values() if isinstance(entry, torch.nn.Module)]
        trained = (p for m in modules for p in m.parameters() if p.requires_grad and not p.is_inference())
        return [self._fence.updates, *(p._version for p in trained)]
