"""Carries entries of compile caches to storage and back, in packs: ``ROOT/compile/<toolchain>/<name>.pack``.

A compiler writes thousands of small files, each of which would cost an object store a request. A pack is written first
and its index after it, which makes it valid; neither is ever changed. So several nodes may carry at once, and a writer
that dies leaves nothing that could be read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
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
from rekindle.storage.private import StoredFile, open_private

__all__ = ["PACK_BYTES", "PACK_ENTRIES", "Pack", "Packs"]

PACK_BYTES = 8 << 20
"""Bytes of files after which a pack ends. The agent holds as many in memory, and a drain waits for no more."""
PACK_ENTRIES = 8192
"""Files after which a pack ends: its index stays below ``MAX_INDEX`` with paths of any length."""
_MOST_PACKS = 500
"""Most packs of a root. A start reads the index of each, which takes an object store 10 s at 20 ms for a request."""


@dataclass(frozen=True)
class Pack:
    """A pack whose index has been read and found to be sound."""

    name: str
    entries: list[Entry]
    nbytes: int


class Packs:
    """The packs of one root for one toolchain. Its methods raise OSError and FormatError, as ``PrivateFiles`` does."""

    def __init__(self, root: Root, toolchain: str, answered: Callable[[], object] = lambda: None) -> None:
        """``answered`` is called each time that storage has listed, read or written something."""
        self._files, self._answered = open_private(root, "compile"), answered
        self.where, self.toolchain = self._files.where, toolchain
        self._read: dict[str, Pack | None] = {}
        """Packs by name; None for an index that is damaged, or of a newer version."""
        self.damaged: list[str] = []
        """Packs whose index is damaged."""
        self.others: list[str] = []
        """Other toolchains that have packs there, as of the last ``list``."""

    def list(self) -> list[Pack]:
        """Lists the packs, newest first. Reads each index once; a damaged one is left out."""
        stored = {file.name: file for file in self._files.list()}
        self._answered()
        self.others = sorted({name.partition("/")[0] for name in stored} - {self.toolchain})
        indexes = [name for name in stored if name.startswith(f"{self.toolchain}/") and name.endswith(INDEX)]
        found = []
        for index in sorted(indexes, key=lambda name: stored[name].changed, reverse=True)[:_MOST_PACKS]:
            name = index.removeprefix(f"{self.toolchain}/").removesuffix(INDEX)
            if name not in self._read:
                self._read[name] = self._read_index(name)
                self._answered()
            pack, file = self._read[name], stored.get(self._name(name, PACK))
            if pack is not None and file is not None and file.size == pack.nbytes <= PACK_BYTES + MAX_ENTRY:
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
        data = self._files.read(self._name(pack.name, PACK), pack.nbytes)
        at = 0
        for entry in pack.entries:
            part = data[at : at + entry.size]
            at += entry.size
            yield entry, part if digest(part) == entry.digest else None

    def write(self, files: Mapping[str, bytes]) -> None:
        """Writes one pack of these files, by their paths."""
        name, index = encode_index(Entry(path, len(data), digest(data)) for path, data in files.items())
        for ending, data in ((PACK, b"".join(files.values())), (INDEX, index)):
            self._files.write(self._name(name, ending), data)
            self._answered()

    def remove(self, name: str) -> None:
        """Removes a pack, its index first."""
        for ending in (INDEX, PACK):
            self._files.remove(self._name(name, ending))

    def make_room(self) -> None:
        """Removes the oldest packs, of any toolchain, while there are too many; what dead writers have left, too."""
        packs: dict[str, list[StoredFile]] = {}
        for file in self._files.list():  # by name: an index comes before its pack
            packs.setdefault(file.name.removesuffix(INDEX).removesuffix(PACK), []).append(file)
        held, count = sum(file.size for files in packs.values() for file in files), len(packs)
        for files in sorted(packs.values(), key=lambda files: max(file.changed for file in files)):
            if held <= MAX_BYTES and count <= _MOST_PACKS:
                break
            for file in files:
                self._files.remove(file.name)
            held, count = held - sum(file.size for file in files), count - 1

    def _name(self, name: str, ending: str) -> str:
        return f"{self.toolchain}/{name}{ending}"
