"""Holds one slot: a file of the memory store, its mapping, and the snapshot in it."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from rekindle.common.os_errors import describe_error
from rekindle.errors import MemoryStoreError
from rekindle.format.lineage import ShardId
from rekindle.memory.pages import PageLock, Pages

__all__ = ["Slot"]


@dataclass(eq=False)
class Slot:
    """Holds one file and its mapping. For one thread at a time: the one that makes its memory, or else its owner."""

    path: Path
    fd: int
    """-1 once it is closed."""
    stamp: ShardId | None = None
    """Snapshot that the slot holds; None while it is free."""
    map: Pages | None = None
    cache: object = None
    """Views into ``map`` that the writer keeps. Dropped with it."""
    lost: bool = False
    """True if a copy that was given up may still land in it at any time: it is never used again."""

    @property
    def step(self) -> int:
        """Step of its snapshot; -1 while it is free."""
        return self.stamp.step if self.stamp else -1

    @property
    def size(self) -> int:
        """Size of the file in bytes."""
        return os.fstat(self.fd).st_size

    @property
    def held(self) -> int:
        """Bytes of memory that the file takes; fewer than ``size`` if its making was broken off."""
        return os.fstat(self.fd).st_blocks * 512

    def lock(self) -> bool:
        """Locks the file for writing. False while a reader has it pinned. Raises MemoryStoreError."""
        try:
            fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            return False
        except OSError as error:
            raise MemoryStoreError(f"memory store {self.path}: {describe_error(error)}") from error

    def unlock(self) -> None:
        """Unlocks the file, so that it can be drained or used for the next save. Does nothing for a closed one."""
        with suppress(OSError, ValueError):
            fcntl.flock(self.fd, fcntl.LOCK_UN)

    def ready(self, nbytes: int) -> bool:
        """True if ``nbytes`` can be written to it without waiting for memory."""
        return self.map is not None and self.map.made >= nbytes

    def make(self, nbytes: int, page_lock: PageLock | None = None, go_on: Callable[[], bool] = lambda: True) -> None:
        """Makes the memory for ``nbytes``, and maps it. Raises MemoryStoreError when there is no room.

        Returns early once ``go_on`` returns False. What was made before by this process is made use of.
        """
        try:
            if self.map is None or not self.map.can_hold(nbytes):
                self._unmap()
                os.ftruncate(self.fd, nbytes)
                self.map = Pages(self.fd, nbytes)
            self.map.make(self.fd, nbytes, page_lock, go_on)
        except (OSError, ValueError) as error:
            self._unmap()
            with suppress(OSError):
                if self.stamp is None:
                    os.ftruncate(self.fd, 0)
            why = f"no room left for a snapshot of {nbytes:,} bytes: free some of it, or make the file system larger"
            if isinstance(error, OSError) and error.errno not in (errno.ENOSPC, errno.ENOMEM):
                why = describe_error(error)
            raise MemoryStoreError(f"memory store {self.path.parent}: {why}") from error

    def trim(self, nbytes: int) -> None:
        """Gives the file, which is ready for ``nbytes``, exactly that size. Raises OSError.

        The mapping stays as it is: what lies beyond is not touched, and a new one would cost all page faults again.
        """
        assert self.map is not None
        if self.size > nbytes:
            os.ftruncate(self.fd, nbytes)
            self.map.made, self.map.cut = nbytes, True

    def _unmap(self) -> None:
        self.cache = None  # before the mapping that it refers to
        self.map = None

    def close(self) -> None:
        """Closes the file. A second call does nothing: the descriptor's number may be that of another file by then."""
        self._unmap()
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)
