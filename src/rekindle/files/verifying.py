"""Verifies every byte of a file before its object is returned, with all of this process's cores."""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

from rekindle.errors import CorruptError
from rekindle.files.copying import PIECE, Fill, ParallelFile, each
from rekindle.format.crc import join_crcs
from rekindle.format.reader import reader_threads
from rekindle.format.torchzip import Record, read_records
from rekindle.memory.kept import OpenFile

__all__ = ["VerifiedFile", "verify_blocks"]

_STRETCH = 512 << 10
"""Bytes that are read and then hashed while they are still in the processor's cache."""


def verify_blocks(opened: OpenFile, whole: memoryview) -> None:
    """Raises CorruptError if a block of a file in memory differs from its checksum."""
    with ThreadPoolExecutor(reader_threads(in_memory=True), thread_name_prefix="rekindle-verify") as pool:
        for _ in each(pool, lambda number: opened.check(whole, number), range(len(opened.receipt.checksums))):
            pass


class VerifiedFile(ParallelFile):
    """Reads a file of ``torch.save``, and compares each record with its CRC-32 in the same pass.

    torch reads a record in one go: one that differs is an error before anybody has its bytes. Other reads, such as
    those that look for the file's end, are not compared: ``verify_rest`` then reads the records that they touch again.
    """

    def __init__(self, nbytes: int, fill: Fill, where: str, *, in_memory: bool) -> None:
        """Reads the directory. Raises FormatError for what isn't a zip file, CorruptError for a damaged one."""
        super().__init__(nbytes, fill, reader_threads(in_memory=in_memory))
        self._where = where
        self.damage: CorruptError | None = None
        """The error of the first read of damaged bytes: torch may tell of it by an error of its own."""
        try:
            records = read_records(self._read_at, nbytes, where)
        except BaseException:
            self.close()
            raise
        self._unread = {record.start: record for record in records if record.crc}
        """Records with a CRC-32 that have not been compared with it, by their first byte."""

    def _read_at(self, start: int, nbytes: int) -> bytes:
        data = bytearray(max(0, min(nbytes, self._nbytes - start)))
        if data:
            self._fill(memoryview(data), start)
        return bytes(data)

    def _read(self, place: memoryview, start: int) -> None:
        record = self._unread.get(start)
        try:
            if record is None or record.stop - start != len(place):
                super()._read(place, start)
            else:
                self._compare(record, self._in_pieces(self._read_piece, place, start))
        except CorruptError as error:
            self.damage = self.damage or error
            raise

    def _read_piece(self, place: memoryview, start: int) -> tuple[int, int]:
        """Fills a place. Returns the CRC-32 of its bytes, and their number."""
        crc = 0
        for at in range(0, len(place), _STRETCH):
            stretch = place[at : at + _STRETCH]
            self._fill(stretch, start + at)
            crc = zlib.crc32(stretch, crc)
        return crc, len(place)

    def _compare(self, record: Record, pieces: Iterable[tuple[int, int]]) -> None:
        if join_crcs(pieces) != record.crc:
            raise CorruptError(f"{self._where}: record {record.name} differs from its CRC-32")
        del self._unread[record.start]

    def verify_rest(self) -> None:
        """Reads the records that have not been compared with their CRC-32. Raises CorruptError if one differs."""
        for record in list(self._unread.values()):
            sizes = [(at, min(PIECE, record.stop - at)) for at in range(record.start, record.stop, PIECE)]
            self._compare(record, each(self._threads, self._drop_piece, sizes))

    def _drop_piece(self, piece: tuple[int, int]) -> tuple[int, int]:
        start, nbytes = piece
        return self._read_piece(memoryview(bytearray(nbytes)), start)
