"""Lets another process's work fall between any two calls of one process's, moment by moment."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import count
from typing import Any

import pytest

__all__ = ["before_call"]


def before_call(
    number: int, of: object, names: Iterable[str], other: Callable[[], object], patch: pytest.MonkeyPatch
) -> Callable[[], bool]:
    """Has ``other`` do all of its work before call ``number`` of the functions ``names`` of a module or class.

    Returns a function that tells whether there was such a call. The calls of ``other`` are not counted.
    """
    calls, met = count(), []

    def replaced(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            if not met and next(calls) == number:
                met.append(number)
                other()
            return real(*args)

        return call

    for name in names:
        patch.setattr(of, name, replaced(getattr(of, name)))
    return lambda: bool(met)
