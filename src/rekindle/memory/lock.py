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
        fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
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

    def held(self) -> bool:
        """Whether the lock is still ours: somebody may have removed its file, and others then take another one."""
        try:
            return self._fd >= 0 and os.stat(self.path).st_ino == os.fstat(self._fd).st_ino
        except OSError:
            return False

    def release(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    __del__ = release

    @staticmethod
    def holder(path: Path) -> int | None:
        """Process id of whoever holds the lock, 0 if it isn't known, or None when nobody does."""
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError:
            return 0
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return None
        except OSError:  # held; or, as above, it can't be told, and who may be there must not be taken for gone
            with suppress(OSError):
                text = os.read(fd, 32).strip()
                return int(text) if text.isdigit() else 0
            return 0
        finally:
            os.close(fd)


_held: weakref.WeakSet[Lock] = weakref.WeakSet()


def _forget_locks() -> None:
    """A data loader's worker must not keep the rank locked after the trainer's death."""
    for lock in list(_held):
        lock.release()


os.register_at_fork(after_in_child=_forget_locks)
