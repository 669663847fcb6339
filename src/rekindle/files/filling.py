"""Copies the contents of a file into mapped memory, made and checksummed in the same pass."""

from __future__ import annotations

import ctypes
import os
from collections import deque
from concurrent.futures import Future
from contextlib import suppress

import xxhash

from rekindle.common.environ import env_count
from rekindle.common.os_errors import describe_error
from rekindle.common.workers import Workers
from rekindle.errors import MemoryStoreError
from rekindle.files.contents import Contents
from rekindle.format.layout import BLOCK
from rekindle.memory.pages import allocate, populate
from rekindle.memory.slot import Slot

__all__ = ["Filler"]

_PIECE = 256 << 10
"""Bytes copied and then hashed while the processor's cache still has them."""
_MOST = 8
"""Threads that copy at most: more don't copy faster."""


class Filler:
    """Copies contents into slots, with this process's share of the cores. Thread-safe."""

    def __init__(self) -> None:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        self._helpers = max(1, min(_MOST, cores // env_count("LOCAL_WORLD_SIZE"))) - 1
        self._threads = Workers(max(1, self._helpers), "rekindle-files")

    def fill(self, contents: Contents, slot: Slot) -> list[str]:
        """Fills a slot, whose file has the contents' size. Returns the checksums of its blocks.

        Raises MemoryStoreError where there is no room after all, and the errors of segments' ``put``.
        """
        if not contents.nbytes:
            return []
        task = _Task(contents, slot)
        task.fetch()
        helpers: list[Future[object]] = []
        for _ in range(min(self._helpers, len(task.todo) - 1)):
            with suppress(RuntimeError):  # the process ends: this thread does all
                helpers.append(self._threads.submit(task.help))
        try:
            task.help()
        finally:
            task.todo.clear()  # after an error, or an interrupt
            for helper in helpers:
                helper.exception()
        for helper in helpers:
            helper.result()
        return task.finish()


class _Task:
    """The filling of one slot: blocks that any number of threads take one after the other."""

    def __init__(self, contents: Contents, slot: Slot) -> None:
        assert slot.map is not None
        self._contents, self._slot, self._pages = contents, slot, slot.map
        self._data = memoryview(slot.map)
        self._anchor = ctypes.c_char.from_buffer(slot.map)
        self._address = ctypes.addressof(self._anchor)
        count = -(-contents.nbytes // BLOCK)
        self._sums = [""] * count
        self.todo = deque(range(count))

    def fetch(self) -> None:
        """Copies what lies on devices."""
        for segment in self._contents.segments:
            if segment.put is not None:
                for start in range(segment.start // BLOCK * BLOCK, segment.stop, BLOCK):
                    self._make(start, min(start + BLOCK, self._contents.nbytes))
                segment.put(self._data[segment.start : segment.stop])

    def help(self) -> None:
        """Fills blocks as long as there are any."""
        while True:
            try:
                number = self.todo.popleft()
            except IndexError:
                return
            start = number * BLOCK
            stop = min(start + BLOCK, self._contents.nbytes)
            self._make(start, stop)
            state = xxhash.xxh3_64()
            for at in range(start, stop, _PIECE):
                end = min(at + _PIECE, stop)
                self._copy(at, end)
                state.update(self._data[at:end])
            self._sums[number] = state.hexdigest()

    def _make(self, start: int, stop: int) -> None:
        """Makes the memory of a block. A store into pages that a full file system lacks would end the process."""
        if stop > self._pages.made:
            try:
                allocate(self._slot.fd, start, stop - start)
            except OSError as error:
                raise MemoryStoreError(f"memory store {self._slot.path.parent}: {describe_error(error)}") from error
            populate(self._address + start, stop - start)

    def _copy(self, start: int, stop: int) -> None:
        for segment, at, end in self._contents.between(start, stop):
            if segment.put is None:
                ctypes.memmove(self._address + at, segment.address + at - segment.start, end - at)

    def finish(self) -> list[str]:
        """Returns the checksums."""
        self._pages.made = max(self._pages.made, self._contents.nbytes)
        return self._sums
