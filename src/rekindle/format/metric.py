"""Defines the metric of a checkpoint, by which retention finds the best one."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from typing import Any, NamedTuple, Protocol, TypeVar

__all__ = ["MODES", "Metric", "best_of", "is_metric_name"]

MODES = ("min", "max")
"""Modes of a metric: the best value is the least one, or the greatest."""

_NAME = re.compile(r"[!-~](?:[ -~]{0,62}[!-~])?\Z")
"""Matches the name of a metric. It stands in the stamp, which has to fit into a document's first kilobyte."""


class Metric(NamedTuple):
    """A finite value that tells how good a checkpoint is."""

    name: str
    value: float
    mode: str
    """One of ``MODES``."""

    def __str__(self) -> str:
        return f"{self.name} {self.value:.6g}"

    @staticmethod
    def from_json(value: Any) -> Metric | None:
        """Reads a metric; None for none, and for one that makes no sense: no byte of a checkpoint depends on it."""
        if type(value) is not list or len(value) != 3:
            return None
        name, number, mode = value
        if not is_metric_name(name) or type(number) not in (int, float) or mode not in MODES:
            return None
        try:
            return Metric(name, float(number), mode) if math.isfinite(number) else None
        except OverflowError:
            return None


def is_metric_name(name: object) -> bool:
    """Returns True for a text of 1 to 64 printable ASCII characters without spaces at its ends."""
    return isinstance(name, str) and _NAME.match(name) is not None


class _Measured(Protocol):
    """Describes anything of one step that may have a metric."""

    @property
    def step(self) -> int: ...
    @property
    def metric(self) -> Metric | None: ...


_M = TypeVar("_M", bound=_Measured)


def best_of(found: Iterable[_M]) -> _M | None:
    """Returns the best of ``found``, by the metric that the newest one with any names; of equal ones the oldest.

    None if none has a metric.
    """
    measured = sorted(
        ((one.step, one.metric, one) for one in found if one.metric is not None), key=lambda each: each[0]
    )
    if not measured:
        return None
    _, (name, _, mode), _ = measured[-1]
    rivals = [(metric.value, one) for _, metric, one in measured if (metric.name, metric.mode) == (name, mode)]
    choose = min if mode == "min" else max
    return choose(rivals, key=lambda rival: rival[0])[1]
