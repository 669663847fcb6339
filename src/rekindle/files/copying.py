"""Presents a verified file in memory to torch as an open one, and copies from it faster than one thread can read."""

from __future__ import annotations

import ctypes
import io
import os
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

from rekindle.format.reader import copy_from_address, reader_threads
from rekindle.memory.pages import make_ahead

__all__ = ["CopiedFile"]

_PIECE = 4 << 20
"""Bytes that one thread makes the memory for and copies in one go. Less is copied by the caller, without a helper."""


class CopiedFile(io.RawIOBase):
    """Reads from a buffer as from a file. For one reader; close it to end its threads.

    A read of megabytes goes into memory that has never been touched. Pages that are made one by one, at the first store
    into each, take as long as the copy; huge ones can take several times that where the kernel has to find them.
    """

    def __init__(self, whole: memoryview) -> None:
        """Takes a buffer that may be written to, which is never done."""
        self._whole, self._at = whole, 0
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(whole)) if whole else 0
        self._threads = ThreadPoolExecutor(reader_threads(in_memory=True), thread_name_prefix="rekindle-copy")

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: len(self._whole)}[whence]
        return self._at

    def readinto(self, buffer: Any) -> int:
        """Fills ``buffer`` from the place of the last ``seek`` or read on. Returns the number of bytes."""
        place = memoryview(buffer).cast("B")
        start = min(self._at, len(self._whole))
        nbytes = min(len(place), len(self._whole) - start)
        self._at = start + nbytes
        if nbytes <= _PIECE:
            place[:nbytes] = self._whole[start : start + nbytes]
            return nbytes
        copies: list[Future[None]] = []
        try:
            for at in range(0, nbytes, _PIECE):
                piece = place[at : min(at + _PIECE, nbytes)]
                try:
                    copies.append(self._threads.submit(self._copy, piece, start + at))
                except RuntimeError:  # the interpreter ends, or no more threads can be had
                    self._threads.shutdown()  # nobody copies after the return what it has taken
                    self._copy(piece, start + at)
            for copy in copies:
                copy.result()
        finally:  # after an interrupt the buffer is freed, and nobody may write there
            for copy in copies:
                copy.cancel()
            wait(copies)
        return nbytes

    def _copy(self, place: memoryview, start: int) -> None:
        make_ahead(place)
        copy_from_address(place, self._address + start)

    def close(self) -> None:
        self._threads.shutdown()
        super().close()
