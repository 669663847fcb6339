"""Reading a shard: in runs of blocks, by several threads, hashed and put in place in one pass over memory."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, Protocol

import xxhash

from rekindle.format.layout import PAGE, Layout
from rekindle.format.receipt import checksum
from rekindle.format.shard import OpenShard, Stream

__all__ = ["NullSink", "ShardReader", "Sink", "copy_from_address", "read_blocks", "consecutive_runs", "reader_threads"]

_RUN = 8 << 20
"""Bytes of consecutive blocks that one thread works on in one go; a block of 16 MiB is a run of its own."""
_PIECE = 512 << 10
"""Bytes that are put in place and then hashed while the processor's cache still has them."""
_SPREAD = 256
"""Places that one read may fill. The kernel's limit is 1,024."""
_GULP = 4 << 20
"""Bytes of a direct read, and of each thread's buffer. 1 to 8 MiB read equally fast where this was measured."""
_READS = 4
"""Reads of storage that are under way at a time, at least; disks want more than one, whatever the number of cores."""

_REQUESTS = 8
"""Requests for ranges of what is elsewhere that are under way at a time: each one waits for its first byte."""


class Sink(Protocol):
    """Where the bytes of a shard go. Called by several threads, never twice at a time for one block."""

    def place(self, block: int) -> memoryview | None:
        """Writable bytes that block number ``block`` belongs in; None when ``take`` is to be given them."""

    def take(self, block: int, at: int, data: memoryview) -> None:
        """Bytes of a block without a place, the first of them being its byte ``at``. Good until this returns."""

    def lock(self, buffer: mmap.mmap) -> object:
        """Page-lock a buffer that ``take`` will be given parts of. Undone when the result is dropped."""


class NullSink:
    """A sink for bytes that are only to be looked at."""

    def place(self, block: int) -> memoryview | None:
        return None

    def take(self, block: int, at: int, data: memoryview) -> None:
        pass

    def lock(self, buffer: mmap.mmap) -> object:
        return None


def consecutive_runs(layout: Layout, numbers: Iterable[int]) -> Iterator[list[int]]:
    """``numbers`` of blocks, ascending, as lists of neighbours of about 8 MiB."""
    run: list[int] = []
    for number in numbers:
        _, stop = layout.blocks[number]
        if run and (number != run[-1] + 1 or stop - layout.blocks[run[0]][0] > _RUN):
            yield run
            run = []
        run.append(number)
    if run:
        yield run


def reader_threads(in_memory: bool) -> int:
    """This process's share of the cores; for storage at least as many as it takes to keep a disk busy."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    share = max(1, min(8, cores // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))
    return share if in_memory else max(share, _READS)


def copy_from_address(place: memoryview, address: int) -> None:
    """Fill ``place`` from ``address``, outside of the interpreter lock."""
    ctypes.memmove(ctypes.addressof(ctypes.c_char.from_buffer(place)), address, len(place))


class _Buffer:
    """A thread's own page-aligned memory, used for one read after the other."""

    def __init__(self, sink: Sink) -> None:
        mapping = mmap.mmap(-1, _GULP)
        self.data = memoryview(mapping)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
        self._locked = sink.lock(mapping)


class ShardReader:
    """The file of one shard. Direct I/O for what the page cache lacks, where the file system takes it.

    Thread-safe. ``nbytes`` counts what has been read, header included.
    """

    def __init__(self, shard: OpenShard) -> None:
        self.shard = shard
        self.nbytes = 0
        self._lock = threading.Lock()
        self._local = threading.local()
        self._direct = -1 if shard.in_memory or shard.stream else _open_direct(shard.fd)
        self._resident = None if self._direct < 0 else _residency(shard.fd)

    def close(self) -> None:
        if self._direct >= 0:
            os.close(self._direct)
            self._direct = -1

    def header_is_sound(self) -> bool:
        receipt = self.shard.receipt
        header = memoryview(bytearray(receipt.header_bytes))
        if self.shard.stream is None:
            return self._fill(self.shard.fd, [header], 0) and checksum(header) == receipt.header_checksum
        data = b"".join(self.shard.stream(0, receipt.header_bytes))
        self._count(len(data))
        return checksum(data) == receipt.header_checksum

    def read(self, run: list[int], sink: Sink) -> list[int]:
        """Put a run of blocks where ``sink`` wants them. Numbers of those that differ from their checksums.

        Raises OSError when the file can't be read. A file that ends too soon has damaged blocks.
        """
        receipt = self.shard.receipt
        places = {number: sink.place(number) for number in run}
        if self.shard.stream is not None:
            return self._by_stream(self.shard.stream, run, places, sink)
        first, last = receipt.layout.blocks[run[0]][0], receipt.layout.blocks[run[-1]][1]
        resident = self._resident
        direct = resident is not None and not resident.holds(receipt.header_bytes + first, receipt.header_bytes + last)
        if direct or None in places.values():
            return self._by_buffer(run, places, sink, direct)
        return self._straight(run, places)

    # -- straight into place: from memory, or from the page cache --------------------------------------------------

    def _straight(self, run: list[int], places: dict[int, Any]) -> list[int]:
        receipt = self.shard.receipt
        blocks, bad = receipt.layout.blocks, []
        for gulp in _gulps([(n, len(places[n])) for n in run]):
            views = [places[number][at:stop] for number, at, stop in gulp]
            offset = receipt.header_bytes + blocks[gulp[0][0]][0] + gulp[0][1]
            whole = self._fill(self.shard.fd, views, offset)
            for (number, at, stop), view in zip(gulp, views, strict=True):
                if at == 0:
                    state = xxhash.xxh3_64()
                state.update(view)
                if stop == len(places[number]) and state.hexdigest() != receipt.checksums[number]:
                    bad.append(number)
            if not whole:  # the file has become shorter: what follows, and what this read began, isn't there
                number, _, stop = gulp[-1]
                return bad + run[run.index(number) + (stop == len(places[number])) :]
        return bad

    # -- as it comes in: from elsewhere ----------------------------------------------------------------------------

    def _by_stream(self, stream: Stream, run: list[int], places: dict[int, Any], sink: Sink) -> list[int]:
        """One request for all of a run, whose blocks are neighbours."""
        receipt = self.shard.receipt
        blocks, todo, bad = receipt.layout.blocks, iter(run), []
        number = next(todo, None)
        at, state = blocks[run[0]][0], xxhash.xxh3_64()
        for piece in stream(receipt.header_bytes + at, receipt.header_bytes + blocks[run[-1]][1]):
            self._count(len(piece))
            while piece and number is not None:
                start, stop = blocks[number]
                data, piece = piece[: stop - at], piece[stop - at :]
                place = places[number]
                if place is None:
                    sink.take(number, at - start, data)
                else:
                    place[at - start : at - start + len(data)] = data
                state.update(data)
                at += len(data)
                if at == stop:
                    if state.hexdigest() != receipt.checksums[number]:
                        bad.append(number)
                    number, state = next(todo, None), xxhash.xxh3_64()
        return bad if number is None else bad + run[run.index(number) :]

    # -- by way of a buffer: direct I/O, or bytes without a place --------------------------------------------------

    def _by_buffer(self, run: list[int], places: dict[int, Any], sink: Sink, direct: bool) -> list[int]:
        receipt = self.shard.receipt
        base = receipt.header_bytes
        bad: list[int] = []
        if not hasattr(self._local, "buffer"):
            self._local.buffer = _Buffer(sink)
        buffer: _Buffer = self._local.buffer
        begin = end = 0  # the part of the file that is in the buffer
        for number in run:
            start, stop = (base + at for at in receipt.layout.blocks[number])
            state, at = xxhash.xxh3_64(), start
            while at < stop:
                if at >= end:
                    begin = at // PAGE * PAGE
                    end = self._gulp(buffer, begin, base + receipt.layout.blocks[run[-1]][1], direct)
                    if end <= at:
                        return bad + run[run.index(number) :]
                size = min(stop, end, at + _PIECE) - at
                piece = buffer.data[at - begin : at - begin + size]
                place = places[number]
                if place is not None:
                    copy_from_address(place[at - start : at - start + size], buffer.address + at - begin)
                state.update(piece)
                at += size
                if place is None and at in (stop, end):
                    since = max(start, begin)
                    sink.take(number, since - start, buffer.data[since - begin : at - begin])
            if state.hexdigest() != receipt.checksums[number]:
                bad.append(number)
        return bad

    def _gulp(self, buffer: _Buffer, begin: int, stop: int, direct: bool) -> int:
        """Read from ``begin``, a page's first byte, as far as there is room and need; where the bytes then end."""
        size = min(_GULP, -(-(stop - begin) // PAGE) * PAGE)
        try:
            got = os.preadv(self._direct if direct else self.shard.fd, [buffer.data[:size]], begin)
        except OSError as error:
            if not direct or error.errno != errno.EINVAL:
                raise
            self._resident = None  # the file system takes O_DIRECT when a file is opened, and refuses it at a read
            got = os.preadv(self.shard.fd, [buffer.data[:size]], begin)
        self._count(got)
        return min(begin + got, stop)

    def _fill(self, fd: int, views: list[memoryview], offset: int) -> bool:
        """Fill all of ``views``. False at the end of the file."""
        while views:
            got = os.preadv(fd, views, offset)
            if got == 0:
                return False
            self._count(got)
            offset += got
            while views and got >= len(views[0]):
                got -= len(views[0])
                views = views[1:]
            if got:
                views = [views[0][got:], *views[1:]]
        return True

    def _count(self, nbytes: int) -> None:
        with self._lock:
            self.nbytes += nbytes


def _gulps(sizes: list[tuple[int, int]]) -> Iterator[list[tuple[int, int, int]]]:
    """Neighbouring parts (number, first byte, end) of blocks of these sizes that are read together."""
    gulp: list[tuple[int, int, int]] = []
    room = _PIECE
    for number, size in sizes:
        at = 0
        while at < size:
            stop = min(size, at + room)
            gulp.append((number, at, stop))
            room -= stop - at
            at = stop
            if not room or len(gulp) == _SPREAD:
                yield gulp
                gulp, room = [], _PIECE
    if gulp:
        yield gulp


def _open_direct(fd: int) -> int:
    """The same file for direct I/O; -1 where that isn't to be had."""
    flag = getattr(os, "O_DIRECT", 0)
    if flag:
        with suppress(OSError):
            return os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC | flag)
    with suppress(OSError, AttributeError):
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_SEQUENTIAL)
    return -1


def _residency(fd: int) -> _Residency | None:
    try:
        return _Residency(mmap.mmap(fd, 0, access=mmap.ACCESS_COPY))
    except ValueError:  # the file has become empty since it was opened
        return None


class _Residency:
    """Which parts of a file the page cache holds. Looked at through a mapping whose memory is never touched."""

    def __init__(self, mapping: mmap.mmap) -> None:
        self._mapping = mapping
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._mapping))
        self._mincore = getattr(ctypes.CDLL(None), "mincore", None)

    def holds(self, start: int, stop: int) -> bool:
        """Whether all of the bytes from ``start`` to ``stop`` can be had without the disk."""
        if stop > len(self._mapping):  # the file has become shorter since it was opened; the read will tell
            return False
        begin = start // PAGE * PAGE
        pages = (ctypes.c_ubyte * (-(-(stop - begin) // PAGE)))()
        address, size = ctypes.c_void_p(self._address + begin), ctypes.c_size_t(stop - begin)
        return self._mincore is not None and self._mincore(address, size, pages) == 0 and 0 not in bytes(pages)


def read_blocks(
    reader: ShardReader,
    sink: Sink,
    numbers: Iterable[int],
    progress: Callable[[int], object] | None = None,
    to_the_end: bool = False,
) -> list[int]:
    """Read, verify and put in place the blocks of these numbers, ascending. Numbers of those that are damaged, if any.

    Stops soon after the first damaged one unless ``to_the_end``. ``progress`` is given byte counts. Raises OSError
    when the file can't be read.
    """
    layout = reader.shard.receipt.layout
    pieces = list(consecutive_runs(layout, numbers))
    todo = iter(pieces)
    lock, stop = threading.Lock(), threading.Event()
    bad: list[int] = []

    def work() -> None:
        while not stop.is_set():
            with lock:
                run = next(todo, None)
            if run is None:
                return
            try:
                found = reader.read(run, sink)
            except BaseException:
                stop.set()
                raise
            with lock:
                bad.extend(found)
            if found and not to_the_end:
                stop.set()
            if progress is not None:
                progress(layout.blocks[run[-1]][1] - layout.blocks[run[0]][0])

    threads = reader_threads(reader.shard.in_memory) if reader.shard.stream is None else _REQUESTS
    if len(pieces) <= 1:  # a thread would cost more than it reads
        work()
        return bad
    with ThreadPoolExecutor(threads, thread_name_prefix="rekindle-read") as pool:
        try:
            for future in [pool.submit(work) for _ in range(min(threads, len(pieces)))]:
                future.result()
        finally:
            stop.set()
    return sorted(bad)
