"""Puts files at paths of a file system: under a temporary name, synced, then renamed."""

from __future__ import annotations

import errno
import hashlib
import os
import re
import stat
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from rekindle.common.failpoints import reach
from rekindle.common.os_errors import describe_error
from rekindle.errors import FormatError, UsageError
from rekindle.format.receipt import open_file
from rekindle.memory.kept import Identity
from rekindle.storage import disk
from rekindle.storage.copy import PIECE, write_pieces
from rekindle.storage.direct_io import UncachedFile
from rekindle.storage.place import Pieces, Place

__all__ = [
    "LONGEST_PLACEHOLDER",
    "NOT_THERE",
    "PLACEHOLDER",
    "PathPlace",
    "PlaceholderGone",
    "around",
    "is_placeholder",
]

PLACEHOLDER = b"rekindle placeholder: "
"""First bytes of a file that stands at a path until the real one arrives."""
LONGEST_PLACEHOLDER = 1024
"""Bytes of such a file at most."""
NOT_THERE = (FileNotFoundError, NotADirectoryError, PermissionError)
"""Errors of what can't be looked at, now and later. Any other is one of storage, and says nothing."""
_NO_NAMES = (".rekindle-", ".nfs")
"""First letters of names that no program gives: files on their way, and those that NFS keeps for who has them open."""
_MARK = re.compile(rb" \(([0-9a-f]{16})\)\n\Z")


class PlaceholderGone(FileNotFoundError):
    """The placeholder that a file was to replace was renamed or removed while it was written."""


class PathPlace(Place):
    """A file at an absolute path."""

    def __init__(self, path: Path, owner: str = "") -> None:
        """``owner``: see ``rekindle.storage.open``; empty for a place that is only read."""
        self.path, self.target = path, str(path)
        self.mark = ""
        """Mark of the placeholder that stands there, which the file is to replace; empty where none does."""
        self.stood: str | None = None
        """Mark of any that stood there before: a file gives way to another that comes; None for one that does not."""
        self.placing: Callable[[], object] = lambda: None
        """Is called just before a file takes the path's name."""
        mark = hashlib.sha256(os.fsencode(path.name)).hexdigest()[:16]
        # Short and always the same: a name as long as the file's may be too long, and the next writer removes what a
        # killed one left.
        self._temporary = path.with_name(f".rekindle-{mark}-{owner}.tmp")

    def check(self) -> None:
        try:
            mode = os.lstat(self.path).st_mode
        except (FileNotFoundError, NotADirectoryError):
            pass
        except OSError as error:
            raise UsageError(f"{self.path}: {describe_error(error)}") from error
        else:
            if not stat.S_ISREG(mode):
                what = "a directory" if stat.S_ISDIR(mode) else "a symbolic link" if stat.S_ISLNK(mode) else "no file"
                raise UsageError(f"{self.path}: is {what}: a file is only saved where a regular file is, or none")
            if not _may(self.path, os.W_OK):  # a rename would replace what its owner protects
                raise UsageError(f"{self.path}: no right to write it: give this user that right, or remove the file")
        above = self._above()
        if not above.is_dir():
            raise UsageError(f"{self.path}: {above} is a file: see that the path is right")
        if not _may(above, os.W_OK | os.X_OK):
            raise UsageError(f"{self.path}: no right to write in {above}: give this user that right")

    def _above(self) -> Path:
        """Returns the nearest directory above that exists."""
        return next((path for path in self.path.parents if path.exists()), Path(os.sep))

    def trace(self) -> list[int] | None:
        """Returns device and inode of the nearest directory above, and how far down it lies."""
        with suppress(OSError):
            above = self._above()
            info = os.stat(above)
            return [info.st_dev, info.st_ino, len(above.parts)]
        return None

    def check_mounted(self, trace: list[int]) -> None:
        device, inode, depth = trace
        with suppress(OSError):
            if os.stat(Path(*self.path.parts[:depth])).st_ino == inode:
                return  # its device may have another number, as a new mount has
        above = self._above()
        if os.stat(above).st_dev != device:
            what = "is not mounted, as it was when a file for it was saved: mount it again"
            raise FileNotFoundError(errno.ENOENT, what, str(self.path.parent))

    def identify(self) -> Identity | None:
        try:
            return _identity(os.stat(self.path))
        except (FileNotFoundError, NotADirectoryError):
            return None

    def size(self) -> int:
        return os.stat(self.path).st_size

    def write(self, pieces: Pieces, whole: memoryview, progress: Callable[[int], object]) -> Identity:
        def fill(fd: int) -> None:
            with UncachedFile(fd, len(whole)) as file:
                for nbytes in write_pieces(pieces, file):
                    progress(nbytes)
                    reach("upload.copying", 0)
                file.sync()

        return self._replace(fill)

    def write_stream(self, chunks: Iterator[memoryview], nbytes: int) -> Identity:
        def fill(fd: int) -> None:
            disk.allocate(fd, nbytes)
            for chunk in chunks:
                while chunk:
                    chunk = chunk[disk.write(fd, chunk[:PIECE]) :]
                    reach("upload.copying", 0)

        return self._replace(fill)

    def _replace(self, fill: Callable[[int], None]) -> Identity:
        """Lets a new file, which ``fill`` writes, take the path's name once it is synced."""
        if not self.mark:  # else the directory was there: a new one would say that the program removed the placeholder
            disk.make_path(self.path.parent)
        with suppress(OSError):  # the file that is replaced keeps its rights, as torch.save would leave them
            self.mode = stat.S_IMODE(os.stat(self.path).st_mode)
        disk.unlink(self._temporary)  # whatever it is: the name is no secret, and may lead to another file
        fd = self._create(self._temporary)
        try:
            fill(fd)
            disk.fsync(fd)
            reach("upload.written", 0)
            identity = _identity(os.fstat(fd))
            self._take_name()
            disk.sync(self.path.parent)
            return identity
        except BaseException as error:
            if isinstance(error, OSError) and error.filename is None:
                error.filename = self.target
            with suppress(OSError):
                disk.unlink(self._temporary)
            raise
        finally:
            os.close(fd)

    def _take_name(self) -> None:
        """Renames the written file to the path, and on to where its placeholder is renamed at that moment.

        Raises PlaceholderGone if that has gone before, if a file has taken its place, or if one has come that did not
        stand there when this was begun.
        """
        stands, info = self._look() if self.mark or self.stood is not None else (None, None)
        gone = self.mark and stands != self.mark and (info is not None or self.was_removed())
        if gone or (not self.mark and stands and stands != self.stood):
            raise PlaceholderGone(errno.ENOENT, "another placeholder stands there, or none any more", self.target)
        self.placing()
        disk.rename(self._temporary, self.path)
        if stands == self.mark and info is not None and info.st_nlink == 1:
            for path in around(self.path, info.st_ino):  # what was replaced has no name any more
                if _is_same(path, info) and PathPlace(path).standing() == self.mark:
                    disk.rename(self.path, path)
                    disk.sync(path.parent)
                    return

    def _create(self, new: Path) -> int:
        """Makes an empty file with the rights of ``mode``, for writing. Returns its descriptor."""
        fd = disk.create_new(new, self.mode)
        with suppress(OSError):  # some file systems have no rights
            os.fchmod(fd, self.mode)  # the umask of an agent is that of the program which started it
        return fd

    def read(self, start: int, stop: int) -> Iterator[memoryview]:
        fd = self.open()
        try:
            while start < stop and (piece := os.pread(fd, min(PIECE, stop - start), start)):
                yield memoryview(piece)
                start += len(piece)
        finally:
            os.close(fd)

    def open(self) -> int:
        """Opens the file for reading. Raises OSError, or FormatError for what is no regular file."""
        try:
            return open_file(Path(os.path.realpath(self.path)))
        except FormatError as error:
            raise FormatError(f"{self.path}: is not a regular file") from error

    def put_placeholder(self, text: str, mark: str = "") -> bool:
        """Lets a small file stand at the path, if nothing is there yet. True if it was made.

        ``mark``: 16 hexadecimal digits that no other placeholder has.
        """
        disk.make_path(self.path.parent)
        new = self._temporary.with_name(f"{self._temporary.name}.{os.getpid()}.{threading.get_ident()}")
        disk.unlink(new)
        fd = self._create(new)
        try:
            disk.write(fd, PLACEHOLDER + os.fsencode(f"{text} ({mark})" if mark else text) + b"\n")
            os.link(new, self.path)  # unlike a rename, never over a file that is there
            return True
        except FileExistsError:
            return False
        finally:
            os.close(fd)
            disk.unlink(new)

    def standing(self) -> str | None:
        """Returns the mark of the placeholder at the path, empty for one without; None for anything else, or nothing.

        Raises OSError.
        """
        return self._look()[0]

    def _look(self) -> tuple[str | None, os.stat_result | None]:
        try:
            with open(open_file(self.path), "rb") as file:
                info = os.fstat(file.fileno())
                head = file.read(LONGEST_PLACEHOLDER) if info.st_size <= LONGEST_PLACEHOLDER else b""
        except NOT_THERE:
            return None, None
        except FormatError:  # a link, or a directory, has taken the place of what was there
            return None, os.lstat(self.path)
        found = _MARK.search(head)
        return (found[1].decode() if found else "") if is_placeholder(head) else None, info

    def lacks(self, mark: str) -> bool:
        """True if the placeholder with this mark is not there, while its directory is. Raises OSError."""
        stands, info = self._look()
        return stands != mark and (info is not None or self.was_removed())

    def was_removed(self) -> bool:
        """True if nothing is at the path, in a directory that is there. Raises OSError."""
        return self.path.parent.is_dir() and self.identify() is None

    def holds_placeholder(self) -> bool:
        """True if a placeholder stands at the path. Raises OSError, FormatError."""
        with open(self.open(), "rb") as file:
            return is_placeholder(file.read(len(PLACEHOLDER)))

    def has_arrived(self) -> bool:
        return self.identify() is not None and not self.holds_placeholder()

    def remove_placeholder(self, mark: str) -> None:
        """Removes what stands at the path, if it is the placeholder with this mark."""
        if self.standing() == mark:
            disk.unlink(self.path)


def around(path: Path, inode: int | None = None) -> Iterator[Path]:
    """Yields the paths to which programs rename a file: any in its directory, its own name in those around it.

    ``inode``: of the first kind only those with this number. Raises OSError.
    """
    above = path.parent
    beside, further = _entries(above), _entries(above.parent)
    for entry in beside:
        if inode in (None, entry.inode()) and entry.is_file(follow_symlinks=False):
            yield Path(entry.path)
    yield above.parent / path.name
    for entry in (*further, *beside):
        if entry.is_dir(follow_symlinks=False):
            yield Path(entry.path, path.name)


def _entries(directory: Path) -> list[os.DirEntry[str]]:
    with suppress(*NOT_THERE), os.scandir(directory) as entries:
        return [entry for entry in entries if not entry.name.startswith(_NO_NAMES)]
    return []


def _is_same(path: Path, info: os.stat_result) -> bool:
    with suppress(*NOT_THERE):
        return os.path.samestat(os.lstat(path), info)
    return False


def _identity(info: os.stat_result) -> Identity:
    return [info.st_ino, info.st_size, info.st_mtime_ns]


def _may(path: Path, how: int) -> bool:
    return os.access(path, how, effective_ids=os.access in os.supports_effective_ids)


def is_placeholder(head: bytes) -> bool:
    """True if a file with these first bytes only stands for one that is on its way."""
    return head.startswith(PLACEHOLDER)
