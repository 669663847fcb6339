"""All by which checkpoints change a disk: one table of plain functions, called as ``system.rename(...)``.

That they are called through the module is what lets a test put a recorder in their place, and build every state that a
power cut could leave of what was asked for (``tests/crash``). Reading needs no such table: a disk doesn't change by it.

All raise OSError as the operating system does.
"""

from __future__ import annotations

import ctypes
import errno
import os
from contextlib import suppress
from pathlib import Path

__all__ = [
    "allocate",
    "create",
    "direct",
    "fsync",
    "make",
    "mkdir",
    "pwrite",
    "rename",
    "reserve",
    "rmdir",
    "sync",
    "unlink",
    "write",
]

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_fallocate = getattr(ctypes.CDLL(None, use_errno=True), "fallocate", None)  # Linux's own


def create(path: Path) -> int:
    """A descriptor of a new file, or of one that is emptied; for writing, and for mapping."""
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)


def direct(fd: int) -> int:
    """Another descriptor of the same file, to be written to past the page cache."""
    return os.open(f"/proc/self/fd/{fd}", os.O_WRONLY | os.O_CLOEXEC | os.O_DIRECT)


def write(fd: int, data: bytes | memoryview) -> int:
    """Bytes written where the last write ended; maybe not all."""
    return os.write(fd, data)


def pwrite(fd: int, data: memoryview, offset: int) -> int:
    """Bytes written at ``offset``; maybe not all. For any number of threads."""
    return os.pwrite(fd, data, offset)


def allocate(fd: int, nbytes: int) -> None:
    """Give an empty file its size and its place on the disk, where that can be done; it reads as zeros.

    Not ``os.posix_fallocate``: where the file system can't do it, glibc touches every block of the file instead.
    """
    if _fallocate is not None and _fallocate(fd, 0, ctypes.c_int64(0), ctypes.c_int64(nbytes)):
        number = ctypes.get_errno()
        if number in _NO_ROOM:  # else it can't be done here, and the writes will tell what is wrong
            raise OSError(number, os.strerror(number))


def reserve(fd: int, nbytes: int) -> None:
    """The same for a file that is to be mapped, for which it must be done: a store into a hole of a full disk kills."""
    os.truncate(fd, nbytes)
    if hasattr(os, "posix_fallocate"):
        # Where the file system can't, a byte of each of its blocks is written: slow, but as sure.
        os.posix_fallocate(fd, 0, nbytes)


def fsync(fd: int) -> None:
    """Return when all that was written to the file is on the disk; its name may not be."""
    os.fsync(fd)


def sync(path: Path) -> None:
    """The same for a file that is closed, or for the names in a directory: what they lead to may not be there."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def rename(path: Path, to: Path) -> None:
    """In place of a file that has that name, or of an empty directory."""
    os.rename(path, to)


def unlink(path: Path) -> None:
    """A file that isn't there is none the worse."""
    path.unlink(missing_ok=True)


def mkdir(path: Path) -> None:
    """A directory that is there already is fine."""
    path.mkdir(exist_ok=True)


def rmdir(path: Path) -> None:
    """An empty directory."""
    os.rmdir(path)


def make(path: Path) -> None:
    """A directory with all that are missing above it, their names synced.

    Its own also where it was there already: somebody may have made it and died before he could.
    """
    if not path.is_dir():
        make(path.parent)
        mkdir(path)
    with suppress(PermissionError):  # above it may lie what only others may read, and keep
        sync(path.parent)
