"""Defines entries of a state that place their tensors themselves, as parts of larger ones that ranks hold together."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch

__all__ = ["PlacedState"]


class PlacedState(ABC):
    """Maps names to parts of tensors, under which any other number and kind of ranks finds them again.

    A restore fills the parts where they lie. All ranks may have values beside the parts.
    """

    @property
    @abstractmethod
    def optimizers(self) -> Sequence[torch.optim.Optimizer]:
        """The optimizers whose updates change the parts that they own; nothing else does."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Returns the parts and the values by their names, without a collective. The same names have the same parts."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Loads the values, and completes what follows from the parts, which have been filled. All ranks call it."""
