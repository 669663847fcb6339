"""The one copy: a shard's bytes from one place to another, verified against its receipt in the same pass."""

from __future__ import annotations

import os
from collections.abc import Callable

import xxhash

from rekindle.errors import CorruptError
from rekindle.failpoints import reach
from rekindle.snapshot.documents import Receipt, checksum

__all__ = ["copy_blocks"]

_PIECE = 1 << 20
"""Bytes hashed and then written: small enough that the write finds them in the processor's cache."""


def copy_blocks(receipt: Receipt, source: memoryview, fd: int, progress: Callable[[int], object]) -> None:
    """Write the shard ``source``, header included, to ``fd``. ``progress`` is given byte counts.

    Raises CorruptError at the first block that differs from its checksum; what was written is then worthless.
    """
    step, base = receipt.stamp.step, receipt.header_bytes
    header = source[:base]
    if checksum(header) != receipt.header_checksum:
        raise CorruptError(f"step {step}, rank {receipt.stamp.rank}: the header differs from its checksum")
    _write(fd, header)
    for number, (start, stop) in enumerate(receipt.layout.blocks):
        state = xxhash.xxh3_64()
        for at in range(base + start, base + stop, _PIECE):
            piece = source[at : min(at + _PIECE, base + stop)]
            state.update(piece)
            _write(fd, piece)
            progress(len(piece))
        if state.hexdigest() != receipt.checksums[number]:
            name = receipt.layout.at(number)
            raise CorruptError(f"step {step}, rank {receipt.stamp.rank}: tensor {name!r} differs from its checksum")
        reach("drain.copying", step)


def _write(fd: int, data: memoryview) -> None:
    while data:
        data = data[os.write(fd, data) :]
