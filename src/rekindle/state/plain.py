"""A holder of plain values, for what has no ``state_dict`` of its own."""

from __future__ import annotations

from typing import Any

__all__ = ["Values"]


class Values:
    """Named plain values that are saved and restored with the rest of the state.

    ::

        progress = rekindle.Values(epoch=0, best=float("inf"))
        progress.epoch += 1

    Values may be anything that the format has a type for, nested: see docs/format.md.
    """

    def __init__(self, **values: Any) -> None:
        self.__dict__.update(values)

    def state_dict(self) -> dict[str, Any]:
        return dict(self.__dict__)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.__dict__.clear()
        self.__dict__.update(state)

    def __getattr__(self, name: str) -> Any:  # only so that type checkers allow any name
        raise AttributeError(f"no value {name!r}: have {', '.join(sorted(self.__dict__)) or 'none'}")

    def __repr__(self) -> str:
        return f"Values({', '.join(f'{k}={v!r}' for k, v in self.__dict__.items())})"
