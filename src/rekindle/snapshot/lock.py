"""Locks on files, which the kernel frees when their holder dies."""

from __future__ import annotations

import fcntl
import os
import time
import weakref
from contextlib import suppress
from pathlib import Path

__all__ = ["Lock"]


class Lock:
    """An exclusive lock on a file that the kernel frees when its holder dies. Not shared with forked children."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd = -1

    def acquire(self, timeout: float = 0.0) -> bool:
        """Take the lock within ``timeout`` seconds. True when it is held."""
        deadline = time.monotonic() + timeout
        while not self._try():
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.02)
        _held.add(self)
        return True

    def _try(self) -> bool:
        fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.stat(self.path).st_ino == os.fstat(fd).st_ino:  # else it was removed while we opened it
                self._fd = fd
                with suppress(OSError):  # full memory: then nobody learns our process id
                    os.ftruncate(fd, 0)
                    os.write(fd, f"{os.getpid()}\n".encode())
                return True
        except (BlockingIOError, FileNotFoundError):
            pass
        os.close(fd)
        return False

    def release(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    __del__ = release

    @staticmethod
    def holder(path: Path) -> int | None:
        """Process id of whoever holds the lock, or None when nobody does."""
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return None
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return None
        except BlockingIOError:
            return int(os.read(fd, 32).strip() or b"0")
        finally:
            os.close(fd)


_held: weakref.WeakSet[Lock] = weakref.WeakSet()


def _forget_locks() -> None:
    """A data loader's worker must not keep the rank locked after the trainer's death."""
    for lock in list(_held):
        lock.release()


os.register_at_fork(after_in_child=_forget_locks)
