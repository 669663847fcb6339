"""Long lists of numbers, as one value instead of one for each number."""

from __future__ import annotations

import sys
from array import array
from typing import Any

__all__ = ["NumberList", "pack_numbers"]

_LONG = 256
"""Numbers from which a list is taken as one value. Each one of a shorter list costs 6 microseconds at every save."""

_CODES = {float: "d", int: "q"}


class NumberList:
    """A list of float, or of int that fit into 64 bits, as it was when this was made."""

    def __init__(self, code: str, data: bytes) -> None:
        """``data``: little-endian; ``code``: "d" for float, "q" for int. Raises ValueError for anything else."""
        if code not in _CODES.values():
            raise ValueError(f"{code!r:.80} is no kind of numbers")
        self.code, self.data = code, data

    @staticmethod
    def of(items: list[Any]) -> NumberList | None:
        """None for what isn't such a list."""
        code = _CODES.get(type(items[0]))
        if code is None or len(set(map(type, items))) != 1:
            return None
        try:
            found = array(code, items)
        except OverflowError:
            return None
        return NumberList(code, _swapped(found).tobytes())

    def items(self) -> list[Any]:
        """The list, of which every bit is as it was. Raises ValueError when bytes are missing."""
        found = array(self.code)
        found.frombytes(self.data)
        return _swapped(found).tolist()


def _swapped(found: array[Any]) -> array[Any]:
    """Between this machine's order of bytes and the format's."""
    if sys.byteorder == "big":
        found.byteswap()
    return found


def pack_numbers(node: Any) -> Any:
    """``node`` with Numbers in place of long lists of numbers in its dictionaries and lists; itself without any."""
    kind = type(node)
    if kind is dict:
        packed = {key: pack_numbers(child) for key, child in node.items()}
        return packed if any(packed[key] is not child for key, child in node.items()) else node
    if kind is not list or not node:
        return node
    if len(node) >= _LONG and (found := NumberList.of(node)) is not None:
        return found
    if type(node[0]) in _CODES:
        return node
    children = [pack_numbers(child) for child in node]
    return children if any(map(lambda a, b: a is not b, children, node)) else node
