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
from rekindle.memory.pages import HUGE, PageLock, Pages

__all__ = ["Slot"]

_GROWTH = 8
"""Divisor: the part of a file's size by which its mapping is longer at first. A state that grows a little, or grows and
shrinks, is given what it lacks, and the rest needn't be mapped anew. Costs addresses, no memory."""
_PIECE = 4 << 20
"""Bytes that a file is cut by in one go, a millisecond: whoever wants the slot waits no longer."""


@dataclass(eq=False)
class Slot:
    """Holds one file and its mapping. For one thread at a time: the one that makes its memory, or else its owner."""

    path: Path
    fd: int
    """-1 once it is closed."""
    stamp: ShardId | None = None
    """Snapshot that the slot holds; None while it is free."""
    map: Pages | None = None
    asked: int = 0
    """Bytes of the state for which its memory was made beside training last; 0 if it has been used since."""
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

    def lacks(self, nbytes: int) -> int:
        """Bytes to be made before ``nbytes`` can be written to it. All of them if it has to be mapped anew."""
        made = self.map.made if self.map is not None and self.map.can_hold(nbytes) else 0
        return max(0, nbytes - made)

    def make(
        self,
        nbytes: int,
        page_lock: PageLock | None = None,
        go_on: Callable[[], bool] = lambda: True,
        *,
        extra: int = 0,
    ) -> None:
        """Makes the memory for ``nbytes``, and maps it. Raises MemoryStoreError when there is no room.

        Makes ``extra`` bytes more if there is room for all of them. Returns early once ``go_on`` returns False.
        Memory that this process made before is made use of.
        """
        whole = nbytes + extra
        try:
            if self.map is None or not self.map.can_hold(whole):
                self._unmap()
                mapped = whole + whole // _GROWTH
                os.ftruncate(self.fd, mapped)  # else it couldn't be mapped; only what is made takes memory
                self.map = Pages(self.fd, mapped)
                os.ftruncate(self.fd, whole)
            elif self.size < whole:
                os.ftruncate(self.fd, whole)
            for end in (nbytes, whole):  # threads share what they make: the extra must not take the room of the rest
                self.map.make(self.fd, end, page_lock, go_on)
        except (OSError, ValueError) as error:
            if self.ready(nbytes):
                self.trim(nbytes)
                return
            self._unmap()
            with suppress(OSError):
                if self.stamp is None:
                    os.ftruncate(self.fd, 0)
            why = f"no room left for a snapshot of {nbytes:,} bytes: free some of it, or make the file system larger"
            if isinstance(error, OSError) and error.errno not in (errno.ENOSPC, errno.ENOMEM):
                why = describe_error(error)
            raise MemoryStoreError(f"memory store {self.path.parent}: {why}") from error

    def trim(self, nbytes: int, go_on: Callable[[], bool] = lambda: True) -> None:
        """Gives the file, which is ready for ``nbytes``, exactly that size. Raises OSError.

        The mapping stays as it is: what lies beyond is not touched, and a new one would cost all page faults again.
        Others may write to what stays meanwhile. Returns early once ``go_on`` returns False.
        """
        assert self.map is not None
        while self.size > nbytes and go_on():
            stop = max(nbytes, (self.size - _PIECE) // HUGE * HUGE)  # no huge page is split but the last
            self.map.made, self.map.cut = min(stop, self.map.made), True
            os.ftruncate(self.fd, stop)

    def _unmap(self) -> None:
        self.cache = None  # before the mapping that it refers to
        self.map = None

    def close(self) -> None:
        """Closes the file. A second call does nothing: the descriptor's number may be that of another file by then."""
        self._unmap()
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)
