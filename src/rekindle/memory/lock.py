"""Locks files. The kernel frees the locks of a process that dies."""

from __future__ import annotations

import fcntl
import os
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

__all__ = ["Lock"]


class Lock:
    """Holds an exclusive lock on a file, which also names the holder's process id. Forked children don't share it.

    For one thread at a time.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd = -1

    def acquire(self, timeout: float = 0.0) -> bool:
        """Takes the lock within ``timeout`` seconds. True if it is held then. Raises OSError."""
        deadline = time.monotonic() + timeout
        while not self._try():
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.02)
        _held.add(self)
        return True

    def _try(self) -> bool:
        fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.stat(self.path).st_ino == os.fstat(fd).st_ino:  # else it was removed since it was opened
                self._fd = fd
                with suppress(OSError):  # memory is full: the holder's process id stays unknown
                    os.ftruncate(fd, 0)
                    os.write(fd, f"{os.getpid()}\n".encode())
                return True
        except (BlockingIOError, FileNotFoundError):
            pass
        os.close(fd)
        return False

    def held(self) -> bool:
        """True if the lock is still held. If somebody removed its file, another process can lock a new one."""
        try:
            return self._fd >= 0 and os.stat(self.path).st_ino == os.fstat(self._fd).st_ino
        except OSError:
            return False

    def release(self, _close: Callable[[int], None] = os.close) -> None:
        """Releases the lock. May be called again."""
        if self._fd >= 0:
            _close(self._fd)  # a module's names may be gone when the interpreter ends
            self._fd = -1

    __del__ = release

    @staticmethod
    def holder(path: Path) -> int | None:
        """Returns the process id of the lock's holder, 0 if it is unknown, None if nobody holds the lock."""
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError:
            return 0
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return None
        except OSError:  # held; or unknown, and a holder that may be alive must not be taken for dead
            with suppress(OSError):
                text = os.read(fd, 32).strip()
                return int(text) if text.isdigit() else 0
            return 0
        finally:
            os.close(fd)


_held: weakref.WeakSet[Lock] = weakref.WeakSet()
"""All locks of this process, for its forked children to release."""


def _forget_locks() -> None:
    """Releases all locks in a forked child: a data loader's worker must not hold its dead trainer's rank."""
    for lock in list(_held):
        lock.release()


os.register_at_fork(after_in_child=_forget_locks)
