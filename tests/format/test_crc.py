"""The CRC-32 of a whole, from those of its pieces."""

from __future__ import annotations

import zlib

from hypothesis import given
from hypothesis import strategies as st

from rekindle.format.crc import join_crcs


@given(st.lists(st.binary(max_size=200)))
def test_pieces_in_a_row_have_the_crc_of_the_whole(pieces: list[bytes]) -> None:
    assert join_crcs((zlib.crc32(piece), len(piece)) for piece in pieces) == zlib.crc32(b"".join(pieces))


def test_large_pieces() -> None:
    first, second = bytes(range(256)) * (5 << 12), b"x" * ((4 << 20) + 3)
    found = join_crcs([(zlib.crc32(first), len(first)), (zlib.crc32(second), len(second))])
    assert found == zlib.crc32(second, zlib.crc32(first))
