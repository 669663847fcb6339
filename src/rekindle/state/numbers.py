"""Encodes a long list of numbers as one value, instead of one value for each number."""

from __future__ import annotations

import sys
from array import array
from typing import Any

__all__ = ["NumberList", "pack_numbers"]

_LONG = 256
"""Least length of a list that becomes one value. Each number of a shorter list costs 6 microseconds at every save."""

_CODES = {float: "d", int: "q"}


class NumberList:
    """Holds a copy of a list of float, or of int that fit into 64 bits."""

    def __init__(self, code: str, data: bytes) -> None:
        """Takes little-endian ``data``, 8 bytes for each number; ``code`` is "d" for float, "q" for int.

        Raises ValueError for any other code.
        """
        if code not in _CODES.values():
            raise ValueError(f"{code!r:.80} is not a code of numbers")
        self.code, self.data = code, data

    @staticmethod
    def of(items: list[Any]) -> NumberList | None:
        """Returns the numbers of ``items``; None if it is not such a list."""
        code = _CODES.get(type(items[0]))
        if code is None or len(set(map(type, items))) != 1:
            return None
        try:
            found = array(code, items)
        except OverflowError:
            return None
        return NumberList(code, _swapped(found).tobytes())

    def items(self) -> list[Any]:
        """Returns the list, bit for bit as it was. Raises ValueError when bytes are missing."""
        found = array(self.code)
        found.frombytes(self.data)
        return _swapped(found).tolist()


def _swapped(found: array[Any]) -> array[Any]:
    """Converts between this machine's byte order and the format's."""
    if sys.byteorder == "big":
        found.byteswap()
    return found


def pack_numbers(node: Any) -> Any:
    """Returns ``node`` with a NumberList for each long list of numbers in it; ``node`` itself if it has none."""
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
