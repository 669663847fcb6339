"""Holds every call by which checkpoints change a disk: a table of plain functions, called as ``disk.rename(...)``.

Callers go through the module, so that a test can put a recorder in place of each function and build every state that a
power cut could leave (``tests/crash``). Reading needs no such table: it doesn't change a disk.

All functions raise OSError as the operating system does.
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
    "create_new",
    "open_direct",
    "fsync",
    "link",
    "make_path",
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
    """Opens a new or emptied file, for writing and for mapping. Returns its descriptor. A link is refused."""
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)


def create_new(path: Path, mode: int) -> int:
    """Opens a file that isn't there yet, for writing. Returns its descriptor. ``mode`` counts as the umask allows."""
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, mode)


def open_direct(fd: int) -> int:
    """Opens the same file again for direct I/O, past the page cache. Returns the descriptor."""
    return os.open(f"/proc/self/fd/{fd}", os.O_WRONLY | os.O_CLOEXEC | os.O_DIRECT)


def write(fd: int, data: bytes | memoryview) -> int:
    """Writes where the last write ended. Returns the number of bytes written, which may be fewer."""
    return os.write(fd, data)


def pwrite(fd: int, data: memoryview, offset: int) -> int:
    """Writes at ``offset``. Returns the number of bytes written, which may be fewer. Thread-safe."""
    return os.pwrite(fd, data, offset)


def allocate(fd: int, nbytes: int) -> None:
    """Gives an empty file its size and its blocks, where the file system can. It then reads as zeros.

    Avoids ``os.posix_fallocate``: where the file system can't allocate, glibc writes to every block of the file.
    """
    if _fallocate is not None and _fallocate(fd, 0, ctypes.c_int64(0), ctypes.c_int64(nbytes)):
        number = ctypes.get_errno()
        if number in _NO_ROOM:  # any other error: can't be done here, and the writes will report a real one
            raise OSError(number, os.strerror(number))


def reserve(fd: int, nbytes: int) -> None:
    """Gives a file that is to be mapped its size and its blocks, at any cost.

    A store into a hole of a file on a full disk kills the process with SIGBUS.
    """
    os.truncate(fd, nbytes)
    if hasattr(os, "posix_fallocate"):
        # Where the file system can't allocate, glibc writes a byte of each block: slow, and as safe.
        os.posix_fallocate(fd, 0, nbytes)


def fsync(fd: int) -> None:
    """Returns when all that was written to the file is on the disk. Its name may not be."""
    os.fsync(fd)


def sync(path: Path) -> None:
    """Syncs a closed file, or the names in a directory. The files that the names lead to may not be on the disk."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def rename(path: Path, to: Path) -> None:
    """Renames a file or directory. Replaces a file of that name, or an empty directory."""
    os.rename(path, to)


def link(path: Path, to: Path) -> None:
    """Gives a file a second name. Raises FileExistsError where something has that name."""
    os.link(path, to, follow_symlinks=False)


def unlink(path: Path) -> None:
    """Removes a file. One that isn't there is no error."""
    path.unlink(missing_ok=True)


def mkdir(path: Path, mode: int = 0o777) -> None:
    """Makes a directory, with ``mode`` as far as the umask allows. One that is there already is no error."""
    path.mkdir(mode, exist_ok=True)


def rmdir(path: Path) -> None:
    """Removes an empty directory."""
    os.rmdir(path)


def make_path(path: Path) -> None:
    """Makes a directory and all that are missing above it, and syncs their names.

    Syncs the name of one that was there already, too: its maker may have died before syncing it.
    """
    if not path.is_dir():
        make_path(path.parent)
        mkdir(path)
    with suppress(PermissionError):  # a directory above may be readable to its owner only, who keeps it
        sync(path.parent)
