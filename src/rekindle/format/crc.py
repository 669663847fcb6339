"""Joins the CRC-32 of neighbouring pieces, so that several threads can make that of a whole."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

__all__ = ["join_crcs"]

_POLYNOMIAL = 0xEDB88320
"""The polynomial of CRC-32, lowest power in the highest bit, as in all numbers here."""
_ONE, _BYTE = 1 << 31, 1 << 23
"""The polynomials x^0 and x^8."""


def join_crcs(pieces: Iterable[tuple[int, int]]) -> int:
    """Returns the CRC-32 of pieces in a row, from the CRC-32 and the size of each."""
    whole = 0
    for crc, nbytes in pieces:
        whole = _times(_zeros(nbytes), whole) ^ crc
    return whole


@lru_cache(maxsize=64)
def _zeros(nbytes: int) -> int:
    """Returns the factor by which so many bytes of zeros change a CRC-32: x to the power of their bits."""
    factor, square = _ONE, _BYTE
    while nbytes:
        if nbytes & 1:
            factor = _times(square, factor)
        square = _times(square, square)
        nbytes >>= 1
    return factor


def _times(a: int, b: int) -> int:
    """Returns the product of two polynomials, modulo that of CRC-32."""
    product = 0
    while a:
        if a & _ONE:
            product ^= b
        a = a << 1 & 0xFFFFFFFF
        b = b >> 1 ^ (_POLYNOMIAL if b & 1 else 0)
    return product
