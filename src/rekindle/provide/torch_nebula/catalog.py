"""Finds the checkpoints of a folder, in this node's memory and on storage, and tells which are complete.

On storage a checkpoint is ``<folder>/<tag>/`` with a file for each partition. ``complete.txt``, which says OK, comes
last. Before it come vouchers, ``.rekindle-<version>-<whose>.json``: each stands for the partitions of one writer, and
comes after them. One for nobody comes first of all. A version is drawn for each time that a checkpoint is written. It
grows, and tells which is newest.
"""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field

from rekindle.common.os_errors import explain
from rekindle.common.timeouts import with_timeout
from rekindle.files.settings import current_settings
from rekindle.memory.files_dir import FilesDir
from rekindle.memory.kept import KeptFile

__all__ = ["COMPLETE", "OK", "VOUCHER", "Catalog", "Found", "Versions", "newest_version", "voucher_name"]

log = logging.getLogger("rekindle")

COMPLETE, OK = "complete.txt", b"OK"
VOUCHER = ".rekindle-"
"""Beginning of a voucher's name."""
_VOUCHER = re.compile(re.escape(VOUCHER) + r"(\d+)-", re.ASCII)
_LOOK = 10.0
"""Seconds that storage gets to list a folder. Only memory counts after that."""


def voucher_name(version: int, whose: str) -> str:
    """Names the voucher of one writer."""
    return f"{VOUCHER}{version}-{whose}.json"


def newest_version(names: Iterable[str]) -> int:
    """Returns the newest version that vouchers among these names tell; 0 without any: another program's."""
    return max((int(match[1]) for match in map(_VOUCHER.match, names) if match), default=0)


class Versions:
    """The newest version that this process knows. One, so that versions grow whichever folder they are for."""

    newest = 0

    @classmethod
    def see(cls, version: int) -> int:
        """Notes a version, and returns it."""
        cls.newest = max(cls.newest, version)
        return version

    @classmethod
    def draw(cls) -> int:
        """Returns a version that is newer than all: the time in nanoseconds, or one more than the newest."""
        return max(time.time_ns(), cls.newest + 1)


@dataclass
class Found:
    """A checkpoint, complete or not."""

    tag: str
    version: int = 0
    complete: bool = False
    durable: bool = False
    """True if storage has all of it."""
    held: bool = False
    """True if it stays in memory until it is let go."""
    ours: bool = False
    """True if it was written through here, and not by another program."""
    partitions: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class _Kept:
    """A file in memory, as it was before storage was looked at: what it lacks then may be there by now."""

    file: KeptFile
    target: str
    after: list[str]
    stored: bool
    held: bool


class Catalog:
    """The checkpoints of one folder at one moment."""

    def __init__(self, root: str) -> None:
        """Looks into memory and on storage. Storage that doesn't answer is left out, with a warning."""
        self.root = root
        self._store = FilesDir.below(current_settings().base)
        self._kept: dict[str, dict[str, _Kept]] = {}
        self._take_memory()
        self._there: dict[str, list[str]] = {}
        self._ok: dict[str, int] = {}
        self.answered = True
        """True if storage has shown what it has."""
        try:
            self._there, self._ok = with_timeout(_LOOK, root, self._look_at_storage)
        except OSError as error:
            self.answered = False
            log.warning("torch_nebula: only checkpoints in memory are known: %s", explain(error))
        self.found = {tag: self._describe(tag) for tag in sorted(self._kept.keys() | self._there.keys())}

    def _take_memory(self) -> None:
        for file in self._store.kept.newest():
            with suppress(OSError, ValueError):  # given up meanwhile, or damaged
                receipt = file.read_receipt()
                folder, name = os.path.split(receipt.target)
                above, tag = os.path.split(folder)
                if above == self.root:
                    kept = _Kept(file, receipt.target, receipt.terms.after, file.is_stored(), file.held.exists())
                    self._kept.setdefault(tag, {})[name] = kept

    def _look_at_storage(self) -> tuple[dict[str, list[str]], dict[str, int]]:
        """Returns the names in each folder, and the times of those that say OK, by tag."""
        there: dict[str, list[str]] = {}
        ok: dict[str, int] = {}
        with suppress(FileNotFoundError, NotADirectoryError):
            for entry in os.scandir(self.root):
                # A folder that may not be read, such as lost+found, is none of ours.
                with suppress(FileNotFoundError, NotADirectoryError, IsADirectoryError, PermissionError):
                    names = os.listdir(entry.path)
                    if COMPLETE in names:
                        with open(os.path.join(entry.path, COMPLETE), "rb") as file:
                            if file.read(64).strip() == OK:
                                ok[entry.name] = os.fstat(file.fileno()).st_mtime_ns
                    there[entry.name] = names
        return there, ok

    def _describe(self, tag: str) -> Found:
        kept, there = self._kept.get(tag, {}), self._there.get(tag, [])
        partitions = {name for name in [*kept, *there] if name != COMPLETE and not name.startswith(".")}
        version = newest_version([*kept, *there])
        found = Found(tag, version, ours=version > 0, partitions=sorted(partitions))
        if not found.ours:
            found.version = self._ok.get(tag, 0)
        Versions.see(found.version)
        on_its_way = any(not file.stored for file in kept.values())
        found.durable = found.complete = tag in self._ok and not on_its_way
        if COMPLETE in kept and not found.complete:
            mark = kept[COMPLETE]
            found.held = mark.held
            # What storage had, and shows no more, somebody has removed.
            found.complete = not (mark.stored and self.answered) and self._arrived(tag, mark.after)
            # And not where a rank has begun to write it anew since.
            found.complete &= newest_version(map(os.path.basename, mark.after)) == version
        return found

    def _arrived(self, tag: str, targets: Iterable[str]) -> bool:
        """True if all vouchers are in memory or on storage."""
        here, there = self._kept.get(tag, {}), self._there.get(tag, [])
        return all(os.path.basename(target) in here or os.path.basename(target) in there for target in targets)

    def kept(self, tag: str) -> list[KeptFile]:
        """Lists a checkpoint's files in memory, in the order of their saves."""
        return [kept.file for kept in self._kept.get(tag, {}).values()]

    def pending(self, tag: str) -> list[str]:
        """Lists the paths of a checkpoint's files that are on their way to storage."""
        return [file.target for file in self._kept.get(tag, {}).values() if not (file.stored or file.held)]

    def complete(self) -> list[Found]:
        """Lists complete checkpoints, the newest first."""
        return sorted((found for found in self.found.values() if found.complete), key=lambda found: -found.version)

    def newest(self) -> Found | None:
        """Returns the newest complete checkpoint."""
        return next(iter(self.complete()), None)

    def let_go(self, tag: str) -> None:
        """Lets a checkpoint go to storage that is held in memory: what makes it complete last, as it was saved last."""
        for kept in self._kept.get(tag, {}).values():
            self._store.let_go(kept.target)

    def let_newest_go(self) -> None:
        """Lets the newest complete checkpoint go to storage, if it is held in memory."""
        newest = self.newest()
        if newest is not None and newest.held:
            self.let_go(newest.tag)

    def describe(self) -> str:
        """Returns a line about all that there is."""
        whole = [repr(found.tag) for found in self.complete()]
        parts = [repr(found.tag) for found in self.found.values() if not found.complete]
        text = f"there is {', '.join(whole)}" if whole else "there is none"
        return f"{text}; not complete: {', '.join(parts)}" if parts else text
