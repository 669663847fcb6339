"""Presents a file to torch as an open one, and reads from it faster than one thread can."""

from __future__ import annotations

import ctypes
import io
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor, wait
from typing import Any, TypeVar

from rekindle.errors import CorruptError
from rekindle.format.reader import copy_from_address, reader_threads
from rekindle.memory.pages import make_ahead

__all__ = ["PIECE", "CopiedFile", "Fill", "ParallelFile", "each", "filled_from_file", "filled_from_memory"]

PIECE = 4 << 20
"""Bytes that one thread makes the memory for and reads in one go. Less is read by the caller, without a helper."""

Fill = Callable[[memoryview, int], None]
"""Fills a place with a file's bytes from an offset on. Called by several threads."""

_T = TypeVar("_T")
_R = TypeVar("_R")


def filled_from_memory(whole: memoryview) -> Fill:
    """Returns what copies from a buffer that stays. It may be written to, which is never done."""
    address = ctypes.addressof(ctypes.c_char.from_buffer(whole)) if whole else 0
    return lambda place, start: copy_from_address(place, address + start)


def filled_from_file(fd: int, where: str) -> Fill:
    """Returns what reads from an open file. It raises CorruptError for one that was cut off, OSError."""

    def fill(place: memoryview, start: int) -> None:
        while place:
            nbytes = os.preadv(fd, [place], start)
            if not nbytes:
                raise CorruptError(f"{where}: was cut off at byte {start:,} while it was read")
            place, start = place[nbytes:], start + nbytes

    return fill


def each(threads: Executor, work: Callable[[_T], _R], todo: Sequence[_T]) -> Iterator[_R]:
    """Returns the results of ``work`` in their order, by several threads where there are any to be had."""
    try:
        return threads.map(work, todo)
    except RuntimeError:  # the interpreter ends, or no more threads can be had
        return map(work, todo)


class ParallelFile(io.RawIOBase):
    """Reads a file of known size. For one reader; close it to end its threads.

    A read of megabytes goes into memory that has never been touched. Pages that are made one by one, at the first store
    into each, take as long as the copy; huge ones can take several times that where the kernel has to find them.
    """

    def __init__(self, nbytes: int, fill: Fill, threads: int) -> None:
        self._nbytes, self._at = nbytes, 0
        self._fill = fill
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="rekindle-load")

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._nbytes}[whence]
        return self._at

    def readinto(self, buffer: Any) -> int:
        """Fills ``buffer`` from the place of the last ``seek`` or read on. Returns the number of bytes."""
        place = memoryview(buffer).cast("B")
        start = min(self._at, self._nbytes)
        nbytes = min(len(place), self._nbytes - start)
        self._at = start + nbytes
        if nbytes:
            self._read(place[:nbytes], start)
        return nbytes

    def _read(self, place: memoryview, start: int) -> None:
        """Fills ``place`` with the bytes from ``start`` on, all of which the file has."""
        self._in_pieces(self._fill, place, start)

    def _in_pieces(self, work: Callable[[memoryview, int], _T], place: memoryview, start: int) -> list[_T]:
        """Calls ``work`` for each piece of ``place``, several at a time. Returns the results in their order."""
        if len(place) <= PIECE:
            return [work(place, start)]

        def one(piece: memoryview, at: int) -> _T:
            make_ahead(piece)
            return work(piece, at)

        pieces: list[Future[_T]] = []
        try:
            for at in range(0, len(place), PIECE):
                pieces.append(self._submit(one, place[at : at + PIECE], start + at))
            return [piece.result() for piece in pieces]
        finally:  # after an interrupt the buffer is freed, and nobody may write there
            for piece in pieces:
                piece.cancel()
            wait(pieces)

    def _submit(self, work: Callable[[memoryview, int], _T], piece: memoryview, at: int) -> Future[_T]:
        try:
            return self._threads.submit(work, piece, at)
        except RuntimeError:  # the interpreter ends, or no more threads can be had
            self._threads.shutdown()  # nobody writes after the return what it has taken
            done: Future[_T] = Future()
            done.set_result(work(piece, at))
            return done

    def close(self) -> None:
        self._threads.shutdown()
        super().close()


class CopiedFile(ParallelFile):
    """Reads from a buffer that has been verified."""

    def __init__(self, whole: memoryview) -> None:
        """Takes a buffer that may be written to, which is never done."""
        super().__init__(len(whole), filled_from_memory(whole), reader_threads(in_memory=True))
        self._whole = whole
