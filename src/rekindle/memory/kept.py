"""Keeps files in memory: finds, commits, pins and gives up the files of one directory.

A file is ``<key>.<number>.data`` with its receipt ``.json`` and, once storage has it, ``.stored``. The key stands for
its path, and of one key the highest number counts. The receipt is the commit: without it the file does not exist.
With ``.held`` it stays in memory until it is let go. ``<key>.placed`` tells in place of which placeholder
this node last put a file at a path.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import mmap
import os
import re
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from rekindle.common.failpoints import reach
from rekindle.errors import CorruptError, FormatError
from rekindle.format.fields import loads
from rekindle.format.file_receipt import FileReceipt
from rekindle.format.receipt import checksum, open_file, read_file, write_atomic

__all__ = ["Identity", "Kept", "KeptFile", "OpenFile", "key_of"]

Identity = list[int | str | None]
"""Identity of a file on storage, as the store showed it."""

_NAME = re.compile(r"([0-9a-f]{32})\.(\d{12})\.(data|json|stored|held)\Z", re.ASCII)
_NUMBER = slice(33, 45)
"""Place of the number in a name."""
_ABANDONED = 60.0
"""Seconds after which a temporary file, which is written in microseconds, has no writer any more."""
_MOST_MARKS = 100_000
"""Marks that are remembered at most."""
_LOOKS = 100
"""Most looks for a file while files go."""
_LONGEST_SAVE = 3600.0
"""Seconds that a save takes at most: for that long it has to be known if a file was put in place of its placeholder."""


def _number(name: str) -> str:
    return name[_NUMBER]


def key_of(target: str) -> str:
    """Returns the key of a path or URL."""
    return hashlib.sha256(os.fsencode(target)).hexdigest()[:32]


@dataclass(frozen=True)
class KeptFile:
    """Names one file in memory."""

    directory: Path
    key: str
    number: int
    """Its place in the order of all saves."""

    def _with(self, ending: str) -> Path:
        return self.directory / f"{self.key}.{self.number:012d}.{ending}"

    @property
    def data(self) -> Path:
        """Its bytes."""
        return self._with("data")

    @property
    def receipt(self) -> Path:
        """Its receipt, with which it exists."""
        return self._with("json")

    @property
    def stored(self) -> Path:
        """Note of what storage showed of it."""
        return self._with("stored")

    @property
    def held(self) -> Path:
        """Mark of a file that is not to go to storage yet."""
        return self._with("held")

    def read_receipt(self) -> FileReceipt:
        """Reads the receipt. Raises FileNotFoundError once the file is given up, FormatError for a damaged one."""
        return FileReceipt.decode(read_file(self.receipt), self.receipt)

    def name(self) -> str:
        """Returns its target; where the receipt is damaged or gone, the receipt's path."""
        try:
            return self.read_receipt().target
        except (OSError, FormatError):
            return str(self.receipt)

    def identity(self) -> Identity | None:
        """Returns what storage showed of it; None while storage lacks it."""
        return _read_identity(self.stored)

    def is_stored(self) -> bool:
        """True once storage has it."""
        return self.stored.exists()

    def gives_way_to(self, other: KeptFile) -> bool:
        """True if another file is newer, at whose path its placeholder is: one saved later, with no look at the path.

        A save that looked, and saw no placeholder, is older than one that came there since. Raises OSError,
        FormatError.
        """
        receipt = other.read_receipt()
        return not receipt.mark and receipt.trace is None and other.number > self.number

    def note_stored(self, identity: Identity) -> None:
        """Notes that storage has it."""
        write_atomic(self.stored, json.dumps(identity).encode())


def _read_identity(path: Path) -> Identity | None:
    try:
        found = loads(read_file(path))
    except (OSError, ValueError):
        return None
    return found if type(found) is list else None


class OpenFile:
    """Holds an open file of the memory store, pinned: its bytes stay, whoever saves next."""

    def __init__(self, file: KeptFile, receipt: FileReceipt, fd: int) -> None:
        """Takes over ``fd``, on which the pin lies."""
        self.file, self.receipt, self.fd = file, receipt, fd

    def is_current(self) -> bool:
        """False once it is given up, also if a later save has the same name in memory by now."""
        try:
            return os.stat(self.file.data).st_ino == os.fstat(self.fd).st_ino
        except FileNotFoundError:
            return False

    def map(self) -> memoryview:
        """Maps it whole. Writes into the view stay private."""
        if not self.receipt.nbytes:  # the kernel maps no empty file
            return memoryview(bytearray())
        return memoryview(mmap.mmap(self.fd, self.receipt.nbytes, access=mmap.ACCESS_COPY))

    def check(self, data: memoryview, number: int) -> None:
        """Raises CorruptError if a block of ``data``, the whole file, differs from its checksum."""
        start, stop = self.receipt.block(number)
        if checksum(data[start:stop]) != self.receipt.checksums[number]:
            raise CorruptError(f"{self.receipt.target}: its copy in memory differs from its checksum: {self.file.data}")

    def close(self) -> None:
        """Ends the pin. May be called again."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)

    def __enter__(self) -> OpenFile:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class Kept:
    """Finds and changes the files of one directory. Safe to use from any thread or process.

    ``commit``, ``retarget``, ``set_aside``, ``remove``, ``remove_superseded``, ``recycle`` and ``sweep`` are to be
    called under the lock of the store.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._marks: dict[tuple[int, int], str] = {}
        """Marks by inode and time of the receipts that have been read. A number may come again."""

    # -- finding ------------------------------------------------------------------------------------------------

    def _names(self) -> list[str]:
        try:
            return os.listdir(self._directory)
        except OSError:
            return []

    def _scan(self, key: str = "") -> dict[KeptFile, set[str]]:
        """Maps each file, of one key or of all, to the endings that are there, in the order of saves. One listing."""
        names = [name for name in self._names() if name.startswith(key)]
        found: dict[KeptFile, set[str]] = {}
        for match in filter(None, map(_NAME.match, sorted(names, key=_number))):
            found.setdefault(KeptFile(self._directory, match[1], int(match[2])), set()).add(match[3])
        return found

    def files(self, key: str = "") -> list[KeptFile]:
        """Lists all files, or those of one key, in the order of their saves. A superseded one is among them."""
        return [file for file, has in self._scan(key).items() if "json" in has]

    def newest(self, *, stored: bool | None = None) -> list[KeptFile]:
        """Lists the newest file of each key, in the order of their saves: all, or those that storage has or is to get.

        Held files are neither.
        """
        found = {file.key: (file, has) for file, has in self._scan().items() if "json" in has}
        files = [
            file
            for file, has in found.values()
            if stored is None or (stored is ("stored" in has) and "held" not in has)
        ]
        return sorted(files, key=lambda file: file.number)

    def held(self) -> list[KeptFile]:
        """Lists the held files, in the order of their saves."""
        return [file for file, has in self._scan().items() if {"json", "held"} <= has]

    def find(self, key: str) -> KeptFile | None:
        """Returns the newest file of a key."""
        return next(reversed(self.files(key)), None)

    def marked(self, mark: str) -> KeptFile | None:
        """Returns the newest file that storage is to get in place of the placeholder with this mark."""
        for _ in range(_LOOKS):
            gone = False
            for file in reversed(self.newest(stored=False)):
                try:
                    if self._mark(file) == mark:
                        return file
                except FileNotFoundError:  # given up meanwhile, or it belongs at another path now
                    gone = True
                except (OSError, FormatError):  # damaged
                    pass
            if not gone:
                break
        return None

    def _mark(self, file: KeptFile) -> str:
        """Returns the mark in a receipt, which is read once: there may be thousands. Raises as ``read_receipt``."""
        info = os.stat(file.receipt)
        which = info.st_ino, info.st_mtime_ns
        mark = self._marks.get(which)
        if mark is None:
            if len(self._marks) >= _MOST_MARKS:
                self._marks.clear()
            mark = self._marks[which] = file.read_receipt().mark
        return mark

    def placed(self, key: str) -> str:
        """Returns the mark of the placeholder in whose place this node last put a file at a path; empty for none.

        The file may not have come there: a kill or an error may have been faster.
        """
        try:
            found = loads(read_file(self._directory / f"{key}.placed"))
        except (OSError, ValueError):
            return ""
        return found if type(found) is str else ""  # a list of those that were put there, as older versions wrote it

    def note_placed(self, key: str, mark: str) -> None:
        """Notes that a file is about to be put at a path, in place of a placeholder. Raises OSError."""
        write_atomic(self._directory / f"{key}.placed", json.dumps(mark).encode())

    def changed(self) -> int:
        """Returns a number that grows when files come, go or are stored."""
        try:
            return os.stat(self._directory).st_mtime_ns
        except OSError:
            return 0

    def pin(self, file: KeptFile) -> OpenFile:
        """Opens a file. Raises FileNotFoundError once it is given up, CorruptError when it is damaged."""
        receipt = file.read_receipt()
        try:
            fd = open_file(file.data)
        except FileNotFoundError:
            if file.receipt.exists():  # which goes first where a file is given up
                raise CorruptError(f"{receipt.target}: its copy in memory was removed: {file.data}") from None
            raise
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
            if os.stat(file.data).st_ino != os.fstat(fd).st_ino or not file.receipt.exists():
                raise FileNotFoundError(errno.ENOENT, "was given up meanwhile", str(file.data))
            if os.fstat(fd).st_size != receipt.nbytes:
                raise CorruptError(f"{file.data}: has {os.fstat(fd).st_size:,} bytes, should have {receipt.nbytes:,}")
            return OpenFile(file, receipt, fd)
        except BlockingIOError:
            os.close(fd)
            raise FileNotFoundError(errno.ENOENT, "is being given up", str(file.data)) from None
        except BaseException:
            os.close(fd)
            raise

    # -- changing -----------------------------------------------------------------------------------------------

    def commit(self, data: Path, receipt: FileReceipt, stored: Identity | None = None) -> KeptFile:
        """Makes a file of ``data``, a slot that is full. ``stored`` tells that storage has it already.

        Raises OSError, and leaves nothing then.
        """
        file = self._next(receipt.target)
        number = file.number
        reach("files.copied", number)
        os.rename(data, file.data)
        reach("files.renamed", number)
        try:
            if stored is not None:
                file.note_stored(stored)
            if receipt.terms.held:
                write_atomic(file.held, b"")
            write_atomic(file.receipt, receipt.encode())
        except OSError:
            with suppress(OSError):
                file.stored.unlink(missing_ok=True)
                file.held.unlink(missing_ok=True)
                os.rename(file.data, data)
            raise
        reach("files.committed", number)
        return file

    def _next(self, target: str) -> KeptFile:
        number = 1 + max((int(name[_NUMBER]) for name in self._names() if _NAME.match(name)), default=0)
        return KeptFile(self._directory, key_of(target), number)

    def retarget(self, file: KeptFile, target: str) -> None:
        """Lets a file belong at another path, to which its placeholder was renamed.

        It is newer than what belongs there, which is set aside if it has a placeholder of its own. It is given up if
        one was saved later in place of the same placeholder, or there unseen. Whoever is killed in here leaves the file
        under both paths. Raises OSError, FormatError.
        """
        receipt, there = replace(file.read_receipt(), target=target), self.find(key_of(target))
        later = self.marked(receipt.mark)
        if there is not None and not there.is_stored():  # else the placeholder came there after it
            if file.gives_way_to(there):
                later = there
            else:  # its placeholder may have been renamed before this one came there
                self.set_aside(there, receipt.mark)
        if later is None or later.number <= file.number:
            new = self._next(target)
            os.link(file.data, new.data)
            write_atomic(new.receipt, receipt.encode())
        self.remove(file)
        self.remove_superseded()

    def set_aside(self, file: KeptFile, mark: str = "") -> None:
        """Keeps a file that storage lacks from being superseded, until it is known where its placeholder is.

        It gets a key of no path, and keeps its number. ``retarget`` ends that. ``mark``: that of the newer file at its
        path. A file with this mark, or without any, stays what it is. Raises OSError.
        """
        with suppress(FileNotFoundError, FormatError):  # given up, or damaged
            if file.is_stored() or file.held.exists() or (receipt := file.read_receipt()).mark in ("", mark):
                return
            self.remove_superseded()  # of the same path, which would count again; it may be among them
            new = KeptFile(self._directory, key_of(f"{receipt.target}\0{receipt.mark}"), file.number)
            with suppress(FileExistsError):  # of one that was killed in here
                os.link(file.data, new.data)
            os.rename(file.receipt, new.receipt)  # which takes no room: memory may be full
            self.remove(file)

    def remove(self, file: KeptFile) -> None:
        """Gives a file up. Who has it open reads on: its memory goes after that."""
        file.receipt.unlink(missing_ok=True)
        reach("upload.evicted", file.number)
        file.stored.unlink(missing_ok=True)
        file.held.unlink(missing_ok=True)
        file.data.unlink(missing_ok=True)

    def remove_superseded(self) -> None:
        """Removes what killed processes left of older files: one would count again after the newest of its key goes."""
        newest = {file.key: file.number for file in self.newest()}
        for file in self._scan():
            if file.number < newest.get(file.key, 0):
                self.remove(file)

    def recycle(self, file: KeptFile, to: Path) -> int | None:
        """Gives a file up and makes its data the file ``to``, locked for writing. Returns its descriptor.

        Returns None while somebody reads it, where it is gone, or has a second name: then nothing has changed.
        """
        try:
            fd = os.open(file.data, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError:
            return None
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(fd).st_nlink > 1:
                os.close(fd)
                return None
            file.receipt.unlink(missing_ok=True)
            file.stored.unlink(missing_ok=True)
            file.held.unlink(missing_ok=True)
            os.rename(file.data, to)
            return fd
        except (BlockingIOError, FileNotFoundError):
            os.close(fd)
            return None
        except BaseException:
            os.close(fd)
            raise

    def sweep(self) -> None:
        """Removes superseded files, and what killed processes left.

        A file whose bytes somebody has removed stays for as long as storage lacks it: else nobody would be told.
        """
        self.remove_superseded()
        for file, has in self._scan().items():
            if "json" not in has or ("stored" in has and "data" not in has):
                self.remove(file)
        keys = {file.key for file in self._scan()}
        for pattern, seconds in ((".*", _ABANDONED), ("*.placed", _LONGEST_SAVE)):
            for path in self._directory.glob(pattern):
                with suppress(OSError):
                    if path.stem not in keys and time.time() - path.stat().st_mtime > seconds:
                        path.unlink()
