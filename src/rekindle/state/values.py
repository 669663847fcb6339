"""Defines Values, an entry of the state for plain values, which have no ``state_dict`` of their own."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from typing import Any

__all__ = ["Values"]


class Values(MutableMapping[str, Any]):
    """Holds named plain values that are saved and restored with the rest of the state.

    ::

        progress = rekindle.Values(epoch=0, best=float("inf"))
        progress.epoch += 1
        progress["val/loss"] = 0.3

    Each value is an attribute and an item, and all methods of dictionaries work. A value that is named like one of
    these methods, such as ``update``, takes its place as an attribute; ``progress["update"]`` is always the value.

    A value may be of any type that the format knows, and nested: see docs/format.md. Not thread-safe. Raises KeyError
    for a missing item, AttributeError for a missing attribute, TypeError for a name that is not a ``str``.
    """

    def __init__(self, /, **values: Any) -> None:
        self.__dict__.update(values)

    def state_dict(self) -> dict[str, Any]:
        """Returns a shallow copy of the values."""
        return dict(self.__dict__)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Replaces all values by those of ``state``."""
        self.__dict__.clear()
        self.__dict__.update(state)

    def __getitem__(self, name: str) -> Any:
        return self.__dict__[name]

    def __setitem__(self, name: str, value: Any) -> None:
        if not isinstance(name, str):
            raise TypeError(f"name {name!r} of a value is a {type(name).__name__}: must be a str")
        self.__dict__[name] = value

    def __delitem__(self, name: str) -> None:
        del self.__dict__[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.__dict__)

    def __len__(self) -> int:
        return len(self.__dict__)

    __eq__ = object.__eq__  # a mapping would compare values, which may be tensors
    __hash__ = object.__hash__

    def __getattr__(self, name: str) -> Any:  # only so that type checkers allow any name
        raise AttributeError(f"no value {name!r}: have {', '.join(sorted(self.__dict__)) or 'none'}")

    def __repr__(self) -> str:
        return f"Values({', '.join(f'{k}={v!r}' for k, v in self.__dict__.items())})"
