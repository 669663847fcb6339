"""Accepts loaders that are put into a state without Resumable, as far as they know their place."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.utils.data import DataLoader

from rekindle.errors import UsageError

__all__ = ["accept_loaders"]


def accept_loaders(state: Any) -> Any:
    """Returns a state in which loaders with a ``state_dict()``, such as torchdata's, have a stand-in.

    Raises UsageError for a loader without one.
    """
    if not isinstance(state, Mapping):  # refused later
        return state
    return {name: _accept(name, entry) if isinstance(entry, DataLoader) else entry for name, entry in state.items()}


def _accept(name: Any, loader: Any) -> Any:
    if not (hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")):
        raise UsageError(
            f"state[{name!r}] is a {type(loader).__name__}, which does not know its place in the data: put "
            f"rekindle.data.Resumable(loader) into the state in its place, and iterate over that"
        )
    return _StatefulLoader(loader)


class _StatefulLoader:
    """Stands for a loader with a ``state_dict()``, whose iterators draw random numbers as they are made.

    It asks for no state before there is an iterator: that would start workers. A restore makes the iterator at once,
    before the random generators are restored, so that training goes on with the same numbers.
    """

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def state_dict(self) -> dict[str, Any]:
        """Returns the loader's place; nothing before its first iteration."""
        return self._loader.state_dict() if self._loader._iterator is not None else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Has the loader's next iteration begin at a place."""
        if state:
            self._loader.load_state_dict(state)
            self._loader.state_dict()
