"""Writes a file without filling the page cache, which the training's data needs."""

from __future__ import annotations

import ctypes
import errno
import os
import threading
from contextlib import suppress

from rekindle.format.layout import PAGE
from rekindle.storage import disk

__all__ = ["UncachedFile"]

_MOST_UNSYNCED = 64 << 20
"""Bytes of a buffered file that may be on their way to the disk. Beyond that, one of its writers waits for them."""
_SYNC_FILE_RANGE_WRITE = 2
_start_writing = getattr(ctypes.CDLL(None), "sync_file_range", None)  # exists on Linux only


class UncachedFile:
    """Writes past the page cache to the open, empty file ``fd``, which is to have ``nbytes``.

    Where the file system has no direct I/O, each piece starts on its way to the disk as soon as it is written, and
    leaves the page cache when it is there. Some file systems open a file for direct I/O and then refuse the write, or
    can't write from where the data lies: the first refusal ends direct I/O for this file.

    Raises OSError when there is no room for ``nbytes``. ``write`` is thread-safe. ``fd`` stays the caller's.
    """

    def __init__(self, fd: int, nbytes: int) -> None:
        disk.allocate(fd, nbytes)
        self._fd = fd
        self._direct_fd = _open_direct(fd)
        self.direct = self._direct_fd >= 0
        """True while whole pages go past the page cache."""
        self._lock = threading.Lock()
        self._unsynced = 0

    def write(self, data: memoryview, offset: int) -> None:
        """Writes all of ``data`` at ``offset``, a multiple of a page. Raises OSError."""
        nbytes = len(data)
        while data:
            done = self._write_pages(data[: len(data) // PAGE * PAGE], offset) or disk.pwrite(self._fd, data, offset)
            data, offset = data[done:], offset + done
        self._start_writeback(offset - nbytes, nbytes)

    def _write_pages(self, pages: memoryview, offset: int) -> int:
        """Writes past the page cache. Returns the number of bytes written: 0 where direct I/O is refused."""
        if self.direct and pages:
            try:
                return disk.pwrite(self._direct_fd, pages, offset)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                self.direct = False
        return 0

    def _start_writeback(self, offset: int, nbytes: int) -> None:
        """Keeps what has just been written from piling up in the page cache.

        Needed after direct I/O, too: some file systems accept it and write through the cache all the same.
        """
        if _start_writing is not None:
            _start_writing(self._fd, ctypes.c_int64(offset), ctypes.c_int64(nbytes), _SYNC_FILE_RANGE_WRITE)
        with self._lock:
            self._unsynced += nbytes
            much, self._unsynced = self._unsynced >= _MOST_UNSYNCED, self._unsynced % _MOST_UNSYNCED
        if much and self.direct:
            self._drop_cached()
        elif much:
            self.sync()

    def _drop_cached(self) -> None:
        """Drops all from the page cache that is on storage."""
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def sync(self) -> None:
        """Returns when all that was written is on storage and out of the page cache."""
        disk.fsync(self._fd)
        self._drop_cached()

    def close(self) -> None:
        if self._direct_fd >= 0:
            os.close(self._direct_fd)
            self._direct_fd, self.direct = -1, False

    def __enter__(self) -> UncachedFile:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _open_direct(fd: int) -> int:
    """Opens the same file for direct I/O. Returns -1 where the file system has none."""
    if hasattr(os, "O_DIRECT"):
        with suppress(OSError):
            return disk.open_direct(fd)
    return -1
