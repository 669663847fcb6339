"""Reads and writes times as people give them, such as ``"30s"`` and ``"10min"``."""

from __future__ import annotations

import math
import re

__all__ = ["describe_seconds", "parse_seconds", "round_seconds"]

_UNITS = {"ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_FROM = {"d": 1.5 * 86400, "h": 1.5 * 3600, "min": 90.0, "s": 1.0}
"""Least seconds for which a time is written in a unit."""
_TIME = re.compile(rf"([0-9]+(?:\.[0-9]*)?|\.[0-9]+) ?({'|'.join(_UNITS)})")


def parse_seconds(text: str) -> float:
    """Returns the seconds of a text such as ``"30s"``, ``"1.5 h"``, ``"10min"`` or ``"500ms"``; NaN for other texts."""
    match = _TIME.fullmatch(text.strip())
    return float(match[1]) * _UNITS[match[2]] if match else math.nan


def describe_seconds(seconds: float) -> str:
    """Returns a text that ``parse_seconds`` reads, with two digits or more, in the unit that suits its size."""
    unit = next((name for name, least in _FROM.items() if seconds >= least), "ms")
    number = seconds / _UNITS[unit]
    digits = max(0, 1 - math.floor(math.log10(number))) if number > 0 else 0
    text = f"{number:.{digits}f}"
    return f"{text.rstrip('0').rstrip('.') if '.' in text else text}{unit}"


def round_seconds(seconds: float) -> float:
    """Returns the time that ``describe_seconds`` writes down: nobody wants an interval of 47.3126 s."""
    return parse_seconds(describe_seconds(seconds))
