"""Makes the memory of a mapped file, piece by piece and by several threads: allocates it, maps it, page-locks it.

Large files get huge pages, without a mount option or a setting: one page of each 2 MiB is allocated, and
``MADV_COLLAPSE`` (Linux 6.1) makes a huge page of it. That takes half the time of small pages, or a third, and mapping
them again, after a restart, takes next to none. Where the kernel refuses, small pages are made.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress

from rekindle.common.environ import env_count

__all__ = ["AT_ONCE", "HUGE", "LOCKED", "Pages", "PageLock", "make_ahead"]

AT_ONCE = 16 << 20
"""Bytes up to which memory is made inside of ``step()``: some milliseconds, once. More is made beside training."""
LOCKED = 1 << 30
"""Bytes, from the start of the file, at whose multiples one page lock ends and the next begins.

The kernel keeps the process's mappings locked for as long as one call lasts: a tenth of a second for each GiB.
"""
HUGE = 2 << 20
"""Bytes of a huge page."""
_PIECE = 4 << 20
"""Bytes of small pages made by one call, a millisecond or two. Another thread's ``mmap``, ``munmap`` or ``fork`` waits
that long, and no signal interrupts it."""
_TOGETHER = 64 << 20
"""Bytes that one thread takes in hand at a time, some 10 milliseconds."""
_MOST = 4
"""Threads that make memory at most: 4 make 16 GB/s."""
_SLOW = 2.0 / (1 << 30)
"""Seconds of a core for each byte, ten times what is usual, from which on no more huge pages are made: the kernel moves
others' pages out of their way."""
_TRIES = 4
"""Places tried for a mapping that huge pages need at a multiple of their size."""
_MADV_POPULATE_READ, _MADV_POPULATE_WRITE = 22, 23  # Linux 5.14
_MADV_COLLAPSE = 25  # Linux 6.1
_libc = ctypes.CDLL(None, use_errno=True) if sys.platform.startswith("linux") else None
if _libc is not None:
    _libc.mmap.restype = ctypes.c_void_p
    _libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
    _libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]

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
        self = _at_huge_page(lambda: super(Pages, cls).__new__(cls, fd, nbytes), nbytes)
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
        if self.made >= nbytes:
            return
        anchor = ctypes.c_char.from_buffer(self)
        # A view that doesn't keep the mapping alive: its page locks, which the mapping keeps, may keep this one.
        view = (ctypes.c_char * len(self)).from_address(ctypes.addressof(anchor))
        making = _Making(ctypes.addressof(anchor), fd, self.made, nbytes, go_on)
        try:
            making.begin()
            while making.make_one():
                self._note_made(making.reached(self.made), nbytes, page_lock, view)
        finally:
            making.end()
        self._note_made(making.reached(self.made), nbytes, page_lock, view)
        if making.errors:
            raise making.errors.pop()  # which nothing keeps then: it refers to the mapping

    def _note_made(self, reached: int, nbytes: int, page_lock: PageLock | None, view: Bytes) -> None:
        """Page-locks what is made, a part at a time, while other threads make more."""
        while page_lock is not None:
            stop = min(self._locked - self._locked % LOCKED + LOCKED, nbytes)
            if not self._locked < stop <= reached:
                break
            self._locks.append(page_lock(view, self._locked, stop))
            self._locked = stop
        self.made = reached


class _Making:
    """The making of a mapping's memory: pieces that several threads take one after the other."""

    def __init__(self, address: int, fd: int, start: int, nbytes: int, go_on: Callable[[], bool]) -> None:
        self._address, self._fd, self._go_on = address, fd, go_on
        self._there = _has_no_hole(fd)
        self._huge = address % HUGE == 0 and nbytes > AT_ONCE
        starts = [start, *range(start - start % _TOGETHER + _TOGETHER, nbytes, _TOGETHER)]
        self._todo = deque(zip(starts, [*starts[1:], nbytes], strict=True))
        self._done: dict[int, int] = {}
        """By first byte: the end of what is made of a piece."""
        self._helpers: list[threading.Thread] = []
        self._over = False
        self.errors: list[Exception] = []
        """Errors of its threads: no room is left, for one."""

    def begin(self) -> None:
        """Starts threads that help this one, of its priority, on this process's share of the cores."""
        name = threading.current_thread().name
        for _ in range(min(_threads(), len(self._todo)) - 1):
            helper = threading.Thread(target=self._help, name=name, daemon=True)
            with suppress(RuntimeError):  # too many threads, or the interpreter is about to end: this one does more
                helper.start()
                self._helpers.append(helper)

    def _help(self) -> None:
        while self.make_one():
            pass

    def end(self) -> None:
        """Waits for the pieces that others have in hand; no more are taken."""
        self._over = True
        for helper in self._helpers:
            helper.join()

    def make_one(self) -> bool:
        """Makes a piece. Returns False if there are no more, or none is to be made any more."""
        if self._over or self.errors or not self._go_on():
            return False
        try:
            start, stop = self._todo.popleft()
        except IndexError:
            return False
        try:
            self._done[start] = self._make(start, stop)
        except Exception as error:
            self.errors.append(error)
            return False
        return True

    def reached(self, start: int) -> int:
        """Returns the end of what is made without a gap from ``start`` on."""
        while start in self._done:
            start = self._done.pop(start)
        return start

    def _make(self, start: int, stop: int) -> int:
        if self._there:
            populate(self._address + start, stop - start)
            return stop
        if self._huge:
            self._make_huge(-(-start // HUGE) * HUGE, stop // HUGE * HUGE)
        for at in range(start, stop, _PIECE):  # what is huge by now takes microseconds
            if at > start and not self._go_on():
                return at
            end = min(at + _PIECE, stop)
            allocate(self._fd, at, end - at)
            populate(self._address + at, end - at)
        return stop

    def _make_huge(self, start: int, stop: int) -> None:
        """Makes huge pages where the kernel has them. Raises OSError when there is no room for one page of each.

        A page is allocated, not touched: a store into a hole of a full file system would end the process.
        """
        began = time.thread_time()
        for at in range(start, stop, HUGE):
            os.posix_fallocate(self._fd, at, 1)
        if start < stop:
            advise(self._address + start, stop - start, _MADV_COLLAPSE)
            self._huge = self._huge and time.thread_time() - began <= _SLOW * (stop - start)


def _threads() -> int:
    """Returns how many threads make memory: this process's share of the cores, at most 4."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(_MOST, cores // env_count("LOCAL_WORLD_SIZE")))


def _has_no_hole(fd: int) -> bool:
    """True if a file has all its memory, zeroed: an earlier process made it.

    A file system that doesn't know its holes names none, so the memory that it takes counts, too.
    """
    found = os.fstat(fd)
    if found.st_blocks * 512 < found.st_size or not hasattr(os, "SEEK_HOLE"):
        return False
    try:
        return os.lseek(fd, 0, os.SEEK_HOLE) >= found.st_size
    except OSError:
        return False


def _at_huge_page(map_file: Callable[[], Pages], nbytes: int) -> Pages:
    """Maps a file, at a multiple of the size of a huge page if it is large and such an address can be had.

    Python can't name an address, and the kernel takes the highest gap that is long enough. So it is given one.
    """
    others = []
    """Mappings that came to lie in other gaps, and fill those meanwhile."""
    for _ in range(_TRIES if _libc is not None and nbytes > AT_ONCE else 0):
        with _Gap(nbytes):
            pages = map_file()
        if ctypes.addressof(ctypes.c_char.from_buffer(pages)) % HUGE == 0:
            return pages
        others.append(pages)
    return others[0] if others else map_file()


class _Gap:
    """A gap in this process's addresses, of the length of a mapping, that begins at a multiple of 2 MiB."""

    def __init__(self, nbytes: int) -> None:
        self._nbytes = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE

    def __enter__(self) -> None:
        assert _libc is not None
        no_access = 0
        size = self._nbytes + 2 * HUGE
        found = _libc.mmap(None, size, no_access, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
        self._around: list[tuple[int, int]] = []
        if found is None or found == ctypes.c_void_p(-1).value:  # no such addresses: the file is mapped anywhere
            return
        start = -(-found // HUGE) * HUGE
        _libc.munmap(start, self._nbytes)
        stop = start + self._nbytes
        self._around = [(found, start - found), (stop, found + size - stop)]

    def __exit__(self, *exc: object) -> None:
        assert _libc is not None
        for address, nbytes in self._around:
            if nbytes:
                _libc.munmap(address, nbytes)


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
    advise(address, nbytes, _MADV_POPULATE_READ)


def advise(address: int, nbytes: int, advice: int) -> None:
    """Gives the kernel a piece of advice, which it may not know."""
    if _libc is not None:
        _libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), advice)


def make_ahead(place: memoryview) -> None:
    """Makes the pages of a process's own memory that is about to be written, in one go: not each at its first store.

    On a kernel that can't the stores take the page faults.
    """
    if len(place) >= mmap.PAGESIZE:
        address = ctypes.addressof(ctypes.c_char.from_buffer(place))
        start = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
        stop = (address + len(place)) // mmap.PAGESIZE * mmap.PAGESIZE
        advise(start, stop - start, _MADV_POPULATE_WRITE)
