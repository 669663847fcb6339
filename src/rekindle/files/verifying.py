"""Verifies every byte of a file before it is loaded, with all of this process's cores."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from rekindle.errors import CorruptError
from rekindle.format.reader import reader_threads
from rekindle.format.torchzip import ReadAt, Record, read_records
from rekindle.memory.kept import OpenFile

__all__ = ["verify_blocks", "verify_crcs"]

_PIECE = 4 << 20
"""Bytes that are read at a time."""

_T = TypeVar("_T")


def verify_blocks(opened: OpenFile, whole: memoryview) -> None:
    """Raises CorruptError if a block of a file in memory differs from its checksum."""
    _each(lambda number: opened.check(whole, number), range(len(opened.receipt.checksums)), in_memory=True)


def verify_crcs(read: ReadAt, nbytes: int, where: str) -> None:
    """Raises CorruptError if a record of a file of ``torch.save`` differs from its CRC-32, or it was cut off."""

    def verify(record: Record) -> None:
        crc = 0
        for at in range(record.start, record.stop, _PIECE):
            crc = zlib.crc32(read(at, min(_PIECE, record.stop - at)), crc)
        if crc != record.crc:
            raise CorruptError(f"{where}: record {record.name} differs from its CRC-32")

    _each(verify, [record for record in read_records(read, nbytes, where) if record.crc], in_memory=False)


def _each(work: Callable[[_T], None], todo: Sequence[_T], *, in_memory: bool) -> None:
    """Calls ``work`` for each, several at a time. Raises the first error."""
    with ThreadPoolExecutor(reader_threads(in_memory=in_memory), thread_name_prefix="rekindle-verify") as pool:
        results: Iterator[None]
        try:
            results = pool.map(work, todo)
        except RuntimeError:  # the interpreter ends, or no more threads can be had
            results = map(work, todo)
        for _ in results:
            pass
