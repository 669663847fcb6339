"""Makes the memory of a mapped file, piece by piece: allocates it, maps it, page-locks it."""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from collections.abc import Callable

__all__ = ["AT_ONCE", "LOCKED", "Pages", "PageLock", "make_ahead"]

AT_ONCE = 16 << 20
"""Bytes up to which memory is made inside of ``step()``: some milliseconds, once. More is made beside training."""
LOCKED = 1 << 30
"""Bytes, from the start of the file, at whose multiples one page lock ends and the next begins.

The kernel keeps the process's mappings locked for as long as one call lasts: a tenth of a second for each GiB.
"""
_PIECE = 4 << 20
"""Bytes made by one call, a millisecond or two. Another thread's ``mmap``, ``munmap`` or ``fork`` waits that long, and
no signal interrupts it."""
_MADV_POPULATE_READ, _MADV_POPULATE_WRITE = 22, 23  # Linux 5.14
_libc = ctypes.CDLL(None, use_errno=True) if sys.platform.startswith("linux") else None

Bytes = ctypes.Array[ctypes.c_char]
PageLock = Callable[[Bytes, int, int], object]
"""Page-locks bytes ``start`` to ``stop`` of a mapping until the result is dropped. Never fails; it may not succeed."""


class Pages(mmap.mmap):
    """A mapping of a file that owns the locks of its pages.

    Whoever keeps a view of it, to write into it, keeps the mapping and with it the locks: neither goes before all views
    have gone, whatever becomes of the slot.
    """

    made: int
    """Bytes, from the first on, that are allocated, mapped and page-locked."""
    cut: bool
    """True once the file was made shorter. Page locks beyond its end hold pages that are no longer the file's."""

    def __new__(cls, fd: int, nbytes: int) -> Pages:
        """Maps the first ``nbytes`` of a file of at least that size."""
        self = super().__new__(cls, fd, nbytes)
        self.made, self.cut = 0, False
        self._locks, self._locked = [], 0
        return self

    _locks: list[object]
    """Results of page-locking, one for each part; also of those where it failed, so that it isn't tried again."""
    _locked: int

    def __del__(self) -> None:
        getattr(self, "_locks", []).clear()  # while the memory is still mapped; an interrupted __new__ leaves none

    @property
    def page_locked(self) -> bool:
        """True if any part of it is page-locked."""
        return any(lock is not None for lock in self._locks)

    def can_hold(self, nbytes: int) -> bool:
        """True if ``make`` can make ``nbytes``, or has made them."""
        return nbytes <= (self.made if self.cut and self.page_locked else len(self))

    def make(self, fd: int, nbytes: int, page_lock: PageLock | None, go_on: Callable[[], bool]) -> None:
        """Makes what is not yet made of the first ``nbytes`` of the file ``fd``. Raises OSError when there is no room.

        Returns early, to be called again, once ``go_on`` returns False; that takes a piece at most, or a page lock.
        Other threads run meanwhile.
        """
        anchor = ctypes.c_char.from_buffer(self)
        # A view that doesn't keep the mapping alive: its page locks, which the mapping keeps, may keep this one.
        view = (ctypes.c_char * len(self)).from_address(ctypes.addressof(anchor))
        while self.made < nbytes and go_on():
            stop = min(self.made - self.made % _PIECE + _PIECE, nbytes)
            allocate(fd, self.made, stop - self.made)
            populate(ctypes.addressof(anchor) + self.made, stop - self.made)
            if page_lock is not None and stop > self._locked and (stop == nbytes or stop % LOCKED == 0):
                self._locks.append(page_lock(view, self._locked, stop))
                self._locked = stop
            self.made = stop


def allocate(fd: int, start: int, nbytes: int) -> None:
    """Gives a file memory, or disk space, full of zeros. Raises OSError where there is none.

    A store into a hole of a full tmpfs would kill the process with SIGBUS. On tmpfs the first call takes pages, and the
    second one zeroes them. Without that ``populate`` would, under the lock of the process's mappings, for which every
    ``mmap`` of training waits.
    """
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(fd, start, nbytes)
        os.posix_fallocate(fd, start, nbytes)


def populate(address: int, nbytes: int) -> None:
    """Maps pages that exist, so that the first save is as fast as later ones.

    As if for reading: the kernel maps 16 zeroed pages at a time then, and on tmpfs all of them may be written to.
    On a kernel that can't the first save takes the page faults itself.
    """
    if _libc is not None:
        _libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), _MADV_POPULATE_READ)


def make_ahead(place: memoryview) -> None:
    """Makes the pages of a process's own memory that is about to be written, in one go: not each at its first store.

    On a kernel that can't the stores take the page faults.
    """
    if _libc is not None and len(place) >= mmap.PAGESIZE:
        address = ctypes.addressof(ctypes.c_char.from_buffer(place))
        start = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
        stop = (address + len(place)) // mmap.PAGESIZE * mmap.PAGESIZE
        _libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(stop - start), _MADV_POPULATE_WRITE)
