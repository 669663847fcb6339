"""Lays out and reads the zip file of ``torch.save``: stored records, each aligned, with its CRC-32 behind it.

Writers know the place of every byte before they copy the first one. CRC-32 fields are left zero, which stands for none,
until somebody who reads all bytes fills them in (``CrcFiller``).
"""

from __future__ import annotations

import struct
import zlib
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from rekindle.errors import CorruptError, FormatError

__all__ = ["MAGIC", "CrcFiller", "Record", "ZipLayout", "lay_out", "read_records"]

MAGIC = b"PK\x03\x04"
"""First bytes of every file of ``torch.save`` since torch 1.6."""
ALIGNMENT = 64
"""Alignment of each record's bytes, as torch has it: tensors that are mapped need no copy."""

_FOLDER = "archive/"
_LOCAL = struct.Struct("<4sHHHHHIIIHH")
_BEHIND = struct.Struct("<4sIII")
_BEHIND_64 = struct.Struct("<4sIQQ")
_ENTRY = struct.Struct("<4sHHHHHHIIIHHHHHII")
_END_64 = struct.Struct("<4sQHHIIQQQQ")
_LOCATOR = struct.Struct("<4sIQI")
_END = struct.Struct("<4sHHHHIIH")
_BEHIND_MAGIC, _ENTRY_MAGIC, _END_MAGIC = b"PK\x07\x08", b"PK\x01\x02", b"PK\x05\x06"
_END_64_MAGIC, _LOCATOR_MAGIC = b"PK\x06\x06", b"PK\x06\x07"
_FULL, _MANY = 0xFFFFFFFF, 0xFFFF
"""Values that send a reader to the 64-bit field instead."""
_CRC_FOLLOWS = 1 << 3
"""Flag of a record whose CRC-32 lies behind its bytes."""
_FIRST_DAY = 0x21
"""January 1, 1980, as in torch's files: equal states make equal files."""
_CRC_IN_ENTRY, _CRC_BEHIND = 16, 4
"""Places of the CRC-32 in a directory entry, and behind a record's bytes."""
_LONGEST_COMMENT = 0xFFFF

ReadAt = Callable[[int, int], bytes]
"""Returns so many bytes from an offset on, or fewer where the file ends."""


@dataclass(frozen=True)
class Record:
    """One record of a zip file."""

    name: str
    start: int
    stop: int
    crc: int
    """CRC-32 of its bytes; 0 where the file has none, or the bytes are compressed."""
    crc_at: tuple[int, ...]
    """Offsets of the fields that hold it."""


@dataclass(frozen=True)
class ZipLayout:
    """The places of all bytes of a file: ``parts`` hold everything but the records' bytes."""

    nbytes: int
    records: list[Record]
    parts: list[tuple[int, bytes]]
    """Headers, each with its offset."""

    def with_crcs(self, crcs: Sequence[int]) -> list[tuple[int, bytes]]:
        """Returns the parts with the CRC-32 of each record filled in."""
        offsets = [at for at, _ in self.parts]
        parts = [bytearray(part) for _, part in self.parts]
        for record, crc in zip(self.records, crcs, strict=True):
            for place in record.crc_at:
                number = bisect_right(offsets, place) - 1
                begin = place - offsets[number]
                parts[number][begin : begin + 4] = crc.to_bytes(4, "little")
        return [(at, bytes(part)) for at, part in zip(offsets, parts, strict=True)]


def lay_out(records: Sequence[tuple[str, int]]) -> ZipLayout:
    """Returns the layout of a file with these records: name and size of each, in their order."""
    at, parts = 0, []
    entries, spans = [], []
    for name, nbytes in records:
        path = (_FOLDER + name).encode()
        header = _local_header(path, nbytes, at)
        behind = _BEHIND_64 if nbytes >= _FULL else _BEHIND
        start = at + len(header)
        parts += [(at, header), (start + nbytes, behind.pack(_BEHIND_MAGIC, 0, nbytes, nbytes))]
        entries.append(_entry(path, nbytes, at))
        spans.append((path.decode(), start, start + nbytes))
        at = start + nbytes + behind.size
    found, entry_at = [], at
    for (name, start, stop), entry in zip(spans, entries, strict=True):
        found.append(Record(name, start, stop, 0, (entry_at + _CRC_IN_ENTRY, stop + _CRC_BEHIND)))
        entry_at += len(entry)
    tail = b"".join(entries)
    tail += _end(len(entries), len(tail), at)
    return ZipLayout(at + len(tail), found, [*parts, (at, tail)])


def _local_header(path: bytes, nbytes: int, at: int) -> bytes:
    large = nbytes >= _FULL
    extra = struct.pack("<HHQQ", 1, 16, 0, 0) if large else b""
    size = _FULL if large else 0
    head = at + _LOCAL.size + len(path) + len(extra) + 4
    padding = -head % ALIGNMENT
    extra += struct.pack("<2sH", b"FB", padding) + b"Z" * padding
    needs = 45 if large else 20
    fields = (MAGIC, needs, _CRC_FOLLOWS, 0, 0, _FIRST_DAY, 0, size, size, len(path), len(extra))
    return _LOCAL.pack(*fields) + path + extra


def _entry(path: bytes, nbytes: int, at: int) -> bytes:
    extra = b""
    if nbytes >= _FULL:
        extra += struct.pack("<QQ", nbytes, nbytes)
    if at >= _FULL:
        extra += struct.pack("<Q", at)
    if extra:
        extra = struct.pack("<HH", 1, len(extra)) + extra
    size, offset, needs = min(nbytes, _FULL), min(at, _FULL), 45 if extra else 20
    fields = (_ENTRY_MAGIC, needs, needs, _CRC_FOLLOWS, 0, 0, _FIRST_DAY, 0, size, size, len(path), len(extra))
    return _ENTRY.pack(*fields, 0, 0, 0, 0, offset) + path + extra


def _end(count: int, nbytes: int, at: int) -> bytes:
    """Returns the end of the file, behind a directory of so many entries and bytes at an offset."""
    more = b""
    if count >= _MANY or nbytes >= _FULL or at >= _FULL:
        more = _END_64.pack(_END_64_MAGIC, _END_64.size - 12, 45, 45, 0, 0, count, count, nbytes, at)
        more += _LOCATOR.pack(_LOCATOR_MAGIC, 0, at + nbytes, 1)
    few = min(count, _MANY)
    return more + _END.pack(_END_MAGIC, 0, 0, few, few, min(nbytes, _FULL), min(at, _FULL), 0)


# -- reading ---------------------------------------------------------------------------------------------------------


def read_records(read: ReadAt, nbytes: int, where: str) -> list[Record]:
    """Returns the records of a zip file of ``nbytes``, in the order of its directory.

    Raises FormatError for a file that isn't a zip file, CorruptError for one that was cut off or damaged.
    """
    if read(0, len(MAGIC)) != MAGIC:
        raise FormatError(f"{where}: is no file of torch.save: it does not begin as a zip file")
    try:
        return list(_read_directory(read, nbytes))
    except (struct.error, ValueError, IndexError, OverflowError) as error:
        raise CorruptError(f"{where}: is cut off or damaged: {error}") from error


def _read_directory(read: ReadAt, nbytes: int) -> Iterator[Record]:
    count, size, at = _find_directory(read, nbytes)
    directory, here = read(at, size), 0
    for _ in range(count):
        fields = _ENTRY.unpack_from(directory, here)
        if fields[0] != _ENTRY_MAGIC:
            raise ValueError("an entry of its directory is none")
        name_end = here + _ENTRY.size + fields[10]
        end = name_end + fields[11]
        name = directory[here + _ENTRY.size : name_end].decode("utf-8", "replace")
        packed, unpacked, header = _wide(directory[name_end:end], fields[8], fields[9], fields[16])
        start = _data_start(read, header)
        if start + packed > at:
            raise ValueError(f"record {name!r} reaches into its directory")
        plain = fields[4] == 0 and packed == unpacked
        places = [at + here + _CRC_IN_ENTRY]
        if fields[3] & _CRC_FOLLOWS and read(start + packed, 4) == _BEHIND_MAGIC:
            places.append(start + packed + _CRC_BEHIND)
        yield Record(name, start, start + packed, fields[7] if plain else 0, tuple(places))
        here = end + fields[12]


def _find_directory(read: ReadAt, nbytes: int) -> tuple[int, int, int]:
    """Returns the directory's number of entries, size and offset."""
    begin = max(0, nbytes - _END.size - _LONGEST_COMMENT)
    tail = read(begin, nbytes - begin)
    found = tail.rfind(_END_MAGIC)
    if found < 0:
        raise ValueError("it has no end")
    fields, end = _END.unpack_from(tail, found), begin + found
    count, size, at = fields[4], fields[5], fields[6]
    locator = read(end - _LOCATOR.size, _LOCATOR.size) if end >= _LOCATOR.size else b""
    if locator.startswith(_LOCATOR_MAGIC):  # torch writes one whether it is needed or not
        end = _LOCATOR.unpack(locator)[2]
        wide = _END_64.unpack(read(end, _END_64.size))
        if wide[0] != _END_64_MAGIC:
            raise ValueError("the end of its directory is none")
        count, size, at = wide[7], wide[8], wide[9]
    elif count == _MANY or _FULL in (size, at):
        raise ValueError("the locator of its directory is missing")
    if at + size != end:  # the bytes of a record may look like an end
        raise ValueError("its end is not behind its directory")
    return count, size, at


def _wide(extra: bytes, packed: int, unpacked: int, header: int) -> tuple[int, int, int]:
    """Returns sizes and offset of an entry, from its 64-bit fields where the others are full."""
    values, here = [unpacked, packed, header], 0
    while _FULL in values and here + 4 <= len(extra):
        kind, size = struct.unpack_from("<HH", extra, here)
        if kind == 1:
            place = here + 4
            for index, value in enumerate(values):
                if value == _FULL:
                    (values[index],) = struct.unpack_from("<Q", extra, place)
                    place += 8
            break
        here += 4 + size
    return values[1], values[0], values[2]


def _data_start(read: ReadAt, header: int) -> int:
    fields = _LOCAL.unpack(read(header, _LOCAL.size))
    if fields[0] != MAGIC:
        raise ValueError("a record has no header")
    return header + _LOCAL.size + int(fields[9]) + int(fields[10])


class CrcFiller:
    """Computes the CRC-32 of each record while a file's bytes pass by from the first to the last, and fills it in."""

    def __init__(self, records: Sequence[Record]) -> None:
        self._todo = sorted(records, key=lambda record: record.start)
        self._next, self._crc = 0, 0
        self._places: list[tuple[int, int]] = []
        """Offsets and values of bytes that are to be filled in further on."""

    def take(self, data: memoryview, start: int, stop: int) -> None:
        """Takes bytes ``start`` to ``stop`` of the writable whole, which follow those of the last call."""
        while self._next < len(self._todo) and self._todo[self._next].start < stop:
            record = self._todo[self._next]
            end = min(record.stop, stop)
            self._crc = zlib.crc32(data[max(record.start, start) : end], self._crc)
            if end < record.stop:
                break
            value = self._crc.to_bytes(4, "little")
            self._places += [(at + number, value[number]) for at in record.crc_at for number in range(4)]
            self._next, self._crc = self._next + 1, 0
        for at, byte in self._places:
            if at < stop:
                data[at] = byte
        self._places = [place for place in self._places if place[0] >= stop]
