"""Sizes on the command line."""

from __future__ import annotations

import re
from typing import Any

import click

__all__ = ["GIB", "MIB", "Size", "size_text"]

MIB, GIB = 1 << 20, 1 << 30


def size_text(nbytes: int) -> str:
    """Returns a size as ``Size`` reads it, in the largest unit that leaves no fraction."""
    unit, name = next((u, n) for u, n in ((GIB, "GiB"), (MIB, "MiB"), (1, "")) if nbytes % u == 0)
    return f"{nbytes // unit}{name}"


class Size(click.ParamType):
    """``1GiB``, ``64MiB``, ``5e8``: a number of bytes."""

    name = "size"
    _UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "KI": 2**10, "MI": 2**20, "GI": 2**30}

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        match = re.fullmatch(r"([\d.]+(?:e\d+)?)\s*([KMG]I?)?B?", value.strip(), re.IGNORECASE)
        if not match:
            self.fail(f"{value!r} is no size: write 1GiB, 64MiB or a number of bytes", param, ctx)
        return int(float(match[1]) * self._UNITS[(match[2] or "").upper()])
