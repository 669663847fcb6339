"""Reads and writes MindIO's own format of files.

::

    pickle of the object, storages as persistent ids       "data.pkl"
    bytes of each storage, one behind the other             "data/0", "data/1", ...
    pickled dict: name -> (offset, length)
    offset and length of that dict, 8 bytes each, and "mindio", NUL

Or, of bytes: the bytes, and a dict that says so. The pickles are those of ``torch.save``, so such a file becomes one of
``torch.save`` by a change of wrapping. The format has no checksums: of a file that storage gives, only damage to its
structure is seen. Files of bytes that are saved here have a checksum in their dict.
"""

from __future__ import annotations

import io
import pickle
import struct
from typing import Any

from rekindle.errors import CorruptError, FormatError
from rekindle.files.contents import Contents, Segment, of_records, segment_of
from rekindle.format.file_receipt import FOUND
from rekindle.format.receipt import checksum

__all__ = ["as_torch_file", "bytes_of", "of_bytes", "read_map"]

_TAIL = struct.Struct("<QQ7s")
_MAGIC = b"mindio\0"
_KIND, _BYTES, _LENGTH, _CHECKSUM = "mindio_save_data_type", "directly_bytes", "bytes_length", "checksum"
_PICKLE = "data.pkl"
_OTHERS = (("byteorder", b"little"), ("version", b"3\n"))
"""Records of a file of ``torch.save`` that MindIO's have no counterpart of. All machines that it runs on are alike."""


class _Plain(pickle.Unpickler):
    """Loads dicts, tuples, texts and numbers, and nothing that could run code."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"it names {module}.{name}")


def of_bytes(data: bytes) -> Contents:
    """Returns the contents of a file of bytes, which says of itself that it is one."""
    table = pickle.dumps({_KIND: _BYTES, _LENGTH: len(data), _CHECKSUM: checksum(data)}, protocol=4)
    end = table + _TAIL.pack(len(data), len(table), _MAGIC)
    segments = [segment_of(memoryview(part), at) for at, part in ((0, data), (len(data), end)) if part]
    return Contents(FOUND, len(data) + len(end), segments)


def read_map(data: bytes, where: str) -> dict[str, Any]:
    """Returns the dict of a file in MindIO's format.

    Raises FormatError for a file in another format, CorruptError for a damaged one. Runs no code.
    """
    if len(data) < _TAIL.size or not data.endswith(_MAGIC):
        raise FormatError(f"{where}: is neither a file of torch.save nor of MindIO: open_file(path).read() returns it")
    at, nbytes, _ = _TAIL.unpack_from(data, len(data) - _TAIL.size)
    if at + nbytes != len(data) - _TAIL.size:
        raise CorruptError(f"{where}: is cut off or damaged: its table should lie at {at:,}, and take {nbytes:,} bytes")
    try:
        table = _Plain(io.BytesIO(memoryview(data)[at : at + nbytes])).load()
    except Exception as error:  # damage can raise anything here
        raise CorruptError(f"{where}: is damaged: its table can't be read: {error}") from error
    if not isinstance(table, dict) or not _is_sound(table, at):
        raise CorruptError(f"{where}: is damaged: its table doesn't fit the file")
    return table


def _is_sound(table: dict[Any, Any], end: int) -> bool:
    """True if a table names no bytes beyond ``end``, where it begins itself."""
    if table.get(_KIND) == _BYTES:
        return type(table.get(_LENGTH)) is int and table[_LENGTH] == end
    return _PICKLE in table and all(isinstance(name, str) and _is_span(span, end) for name, span in table.items())


def _is_span(span: Any, end: int) -> bool:
    if not isinstance(span, tuple) or [*map(type, span)] != [int, int]:
        return False
    at, nbytes = span
    return bool(at >= 0 and nbytes >= 0 and at + nbytes <= end)


def bytes_of(data: bytes, table: dict[str, Any], where: str) -> bytes | None:
    """Returns the bytes that a file is of; None if it is of an object. Raises CorruptError for damaged ones."""
    if table.get(_KIND) != _BYTES:
        return None
    found = data[: table[_LENGTH]]
    if table.get(_CHECKSUM, sums := checksum(found)) != sums:
        raise CorruptError(f"{where}: its bytes differ from their checksum")
    return found


def as_torch_file(data: bytes, table: dict[str, Any]) -> Contents:
    """Returns the contents of the ``torch.save`` file of the same object. They stay in ``data``."""
    whole = segment_of(memoryview(data), 0)
    records = [(name, Segment(0, nbytes, whole.address + at, whole.owner)) for name, (at, nbytes) in table.items()]
    records += [(name, segment_of(memoryview(text), 0)) for name, text in _OTHERS]
    return of_records(records)
