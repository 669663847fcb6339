"""Reads and writes the index of a pack: the names, lengths and digests of some files of compile caches.

A pack is these files, one after the other. Its index is called by the SHA-256 of its own bytes, and the pack is called
the same: one that is damaged, or that was written by halves, is known for what it is (see docs/format.md).
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass

from rekindle.errors import FormatError, VersionError
from rekindle.format.fields import check_integer, check_texts, loads

__all__ = ["CACHES", "INDEX", "MAX_BYTES", "MAX_ENTRY", "MAX_INDEX", "PACK", "Entry"]
__all__ += ["decode_index", "digest", "encode_index", "is_entry_path"]

CACHES = ("inductor", "triton", "cuda", "jax", "mindspore")
"""Folders that entries lie in, one for each compiler."""
INDEX, PACK = ".json", ".pack"
"""Endings of the names of an index and of its pack."""
MAX_BYTES = 2 << 30
"""Most bytes of compile caches: on storage at any time, in memory at a start."""
MAX_ENTRY = 64 << 20
"""Most bytes of an entry. Kernels have kilobytes, libraries of them some megabytes."""
MAX_INDEX = 16 << 20
"""Most bytes of an index."""

_KIND, _VERSION = "rekindle-compile-cache", "1.0"
_DIGEST = re.compile(r"[0-9a-f]{64}")
_LONGEST = 1024
"""Most characters of an entry's path."""


@dataclass(frozen=True)
class Entry:
    """One file of a compile cache."""

    path: str
    """Path below the caches' directory, with slashes."""
    size: int
    digest: str
    """SHA-256 of its bytes, in hexadecimal."""


def digest(data: bytes) -> str:
    """Returns the SHA-256 of ``data`` in hexadecimal."""
    return hashlib.sha256(data).hexdigest()


def is_entry_path(path: str) -> bool:
    """True if an entry may have this path: below one of the caches, with no hidden name in it, and leading nowhere
    else."""
    parts = path.split("/")
    plain = all(part and not part.startswith(".") for part in parts) and "\0" not in path
    return plain and len(parts) > 1 and parts[0] in CACHES and len(path) <= _LONGEST


def encode_index(entries: Iterable[Entry]) -> tuple[str, bytes]:
    """Returns the index of a pack that holds these entries in this order, and the name that both have."""
    listed = [[entry.path, entry.size, entry.digest] for entry in entries]
    data = json.dumps({"format": _KIND, "version": _VERSION, "entries": listed}, separators=(",", ":")).encode()
    return digest(data), data


def decode_index(name: str, data: bytes) -> list[Entry]:
    """Returns the entries that an index called ``name`` lists.

    Raises FormatError when the bytes are not those that it was named after, or list what is no entry; VersionError when
    a newer major version has written them.
    """
    if digest(data) != name:
        raise FormatError(f"{name}{INDEX}: is damaged: its bytes differ from its name")
    try:
        fields = loads(data)
        if fields["format"] != _KIND:
            raise ValueError(f"is a {fields['format']!r}")
        if str(fields["version"]).partition(".")[0] != _VERSION.partition(".")[0]:
            raise VersionError(f"{name}{INDEX}: format version {fields['version']!r}: update Rekindle to read it")
        return [_entry(*each) for each in fields["entries"]]
    except VersionError:
        raise
    except (ValueError, TypeError, KeyError) as error:
        raise FormatError(f"{name}{INDEX}: {error}") from error


def _entry(path: object, size: object, checksum: object) -> Entry:
    (text, hexadecimal) = check_texts([path, checksum])
    if not is_entry_path(text) or not _DIGEST.fullmatch(hexadecimal):
        raise ValueError(f"{text!r} can't be the name of an entry")
    return Entry(text, check_integer(size, 0, MAX_ENTRY), hexadecimal)
