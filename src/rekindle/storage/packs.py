"""Carries entries of compile caches to storage and back, in packs: ``ROOT/compile/<toolchain>/<name>.pack``.

A compiler writes thousands of small files, each of which would cost an object store a request. A pack is written first
and its index after it, which makes it valid; neither is ever changed. So several nodes may carry at once, and a writer
that dies leaves nothing that could be read.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from rekindle.errors import FormatError, VersionError
from rekindle.format.compile_index import (
    INDEX,
    MAX_BYTES,
    MAX_ENTRY,
    MAX_INDEX,
    PACK,
    Entry,
    decode_index,
    digest,
    encode_index,
)
from rekindle.format.names import Root
from rekindle.storage.private import PrivateFiles, StoredFile, open_private

__all__ = ["PACK_BYTES", "Pack", "Packs"]

PACK_BYTES = 8 << 20
"""Bytes of files after which a pack ends. The agent holds as many in memory, and a drain waits for no more."""

_MOST_PACKS = 2000
"""Most packs of a root: each costs a start a request or two."""
_UNFINISHED = 3600.0
"""Seconds for which a pack without an index is left alone: its writer may still be at it."""
_FOLDER = "compile"


@dataclass(frozen=True)
class Pack:
    """A pack whose index has been read and found to be sound."""

    name: str
    entries: list[Entry]
    nbytes: int


class Packs:
    """The packs of one root for one toolchain. Every method raises OSError, as ``PrivateFiles`` does."""

    def __init__(self, root: Root, toolchain: str) -> None:
        self._files: PrivateFiles = open_private(root, _FOLDER)
        self._toolchain = toolchain
        self._read: dict[str, Pack | None] = {}
        """Packs by name; None for an index that is damaged, or of a newer version."""
        self.damaged: list[str] = []
        """Packs whose index is damaged."""
        self.others: list[str] = []
        """Other toolchains that have packs there, as of the last ``list``."""
        self.where = self._files.where

    def list(self) -> list[Pack]:
        """Lists the packs, newest first. Reads each index once; a damaged one is left out."""
        stored = self._files.list()
        self.others = sorted({_split(file.name)[0] for file in stored} - {self._toolchain})
        indexes = [file for file in stored if _split(file.name)[0] == self._toolchain and file.name.endswith(INDEX)]
        sizes = {file.name: file.size for file in stored}
        found = []
        for file in sorted(indexes, key=lambda file: file.changed, reverse=True)[:_MOST_PACKS]:
            name = _split(file.name)[1]
            if name not in self._read:
                self._read[name] = self._read_index(name)
            pack = self._read[name]
            if pack is not None and sizes.get(self._name(name, PACK)) == pack.nbytes <= PACK_BYTES + MAX_ENTRY:
                found.append(pack)
        return found

    def _read_index(self, name: str) -> Pack | None:
        try:
            entries = decode_index(name, self._files.read(self._name(name, INDEX), MAX_INDEX))
        except (VersionError, FileNotFoundError):
            return None
        except FormatError:
            self.damaged.append(name)
            return None
        return Pack(name, entries, sum(entry.size for entry in entries))

    def read(self, pack: Pack) -> Iterator[tuple[Entry, bytes | None]]:
        """Yields each entry with its bytes, or with None where they differ from its digest."""
        data = memoryview(self._files.read(self._name(pack.name, PACK), pack.nbytes))
        at = 0
        for entry in pack.entries:
            part = bytes(data[at : at + entry.size])
            at += entry.size
            yield entry, part if digest(part) == entry.digest else None

    def write(self, files: Iterable[tuple[str, bytes]]) -> None:
        """Writes one pack of these files."""
        given = list(files)
        name, index = encode_index(Entry(path, len(data), digest(data)) for path, data in given)
        self._files.write(self._name(name, PACK), b"".join(data for _, data in given))
        self._files.write(self._name(name, INDEX), index)

    def remove(self, name: str) -> None:
        """Removes a pack, its index first."""
        self._remove(self._toolchain, name)

    def make_room(self) -> None:
        """Removes the oldest packs of any toolchain while there are too many, and what writers that died have left."""
        stored = self._files.list()
        newest = max((file.changed for file in stored), default=0.0)
        packs: dict[tuple[str, str], list[StoredFile]] = {}
        for file in stored:
            packs.setdefault(_split(file.name), []).append(file)
        whole = []
        for key, files in packs.items():
            index = next((file for file in files if file.name.endswith(INDEX)), None)
            if index is not None:
                whole.append((index.changed, key, sum(file.size for file in files)))
            elif max(file.changed for file in files) < newest - _UNFINISHED:
                for file in files:
                    self._files.remove(file.name)
        held, count = sum(nbytes for _, _, nbytes in whole), len(whole)
        for _, (toolchain, name), nbytes in sorted(whole):
            if held <= MAX_BYTES and count <= _MOST_PACKS:
                break
            self._remove(toolchain, name)
            held, count = held - nbytes, count - 1

    def _remove(self, toolchain: str, name: str) -> None:
        for ending in (INDEX, PACK):
            self._files.remove(f"{toolchain}/{name}{ending}")

    def _name(self, name: str, ending: str) -> str:
        return f"{self._toolchain}/{name}{ending}"


def _split(name: str) -> tuple[str, str]:
    """Returns toolchain and pack of a stored file. An unfinished file has a name of its own."""
    toolchain, _, file = name.partition("/")
    return toolchain, file.removesuffix(INDEX).removesuffix(PACK)
