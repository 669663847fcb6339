"""Reads a shard in runs of blocks with several threads. Each byte is placed and hashed in one pass over memory."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any, Protocol

import xxhash

from rekindle.common.environ import env_count
from rekindle.format.layout import PAGE, Layout
from rekindle.format.receipt import checksum
from rekindle.format.shard import OpenShard, Receive, Remote, Stream

__all__ = [
    "REMOTE_PIECE_BYTES",
    "NullSink",
    "ShardReader",
    "Sink",
    "consecutive_runs",
    "copy_from_address",
    "read_blocks",
    "reader_threads",
]

_RUN_BYTES = 8 << 20
"""Bytes of consecutive blocks that one thread reads at a time. A block of 16 MiB is a run of its own."""
_PIECE_BYTES = 512 << 10
"""Bytes that are placed and then hashed while they are still in the processor's cache."""
REMOTE_PIECE_BYTES = 4 << 20
"""Bytes that are received from another node and then hashed. Measured with four threads on two cores: in pieces of
512 KiB they take a third more of the processor, as they wait for each other's turn at the interpreter between them."""
_MAX_VIEWS = 256
"""Buffers that one read fills. The kernel's limit is 1,024."""
_BUFFER_BYTES = 4 << 20
"""Bytes of a direct read, and of each thread's buffer. Measured: 1 to 8 MiB are equally fast."""
_STORAGE_READS = 4
"""Least number of concurrent reads from storage, and of connections to another node, whatever the number of cores."""

_REQUESTS = 8
"""Concurrent requests to an object store. Each one waits for its first byte."""


class Sink(Protocol):
    """Receives the bytes of a shard. Called by several threads, but by one at a time for each block."""

    def place(self, block: int) -> memoryview | None:
        """Returns the writable bytes that block number ``block`` belongs in; None to have them passed to ``take``."""

    def take(self, block: int, at: int, data: memoryview) -> None:
        """Receives bytes of a block without a place, from its byte ``at`` on. ``data`` is valid until this returns."""

    def lock(self, buffer: mmap.mmap) -> object:
        """Page-locks a buffer, parts of which ``take`` will receive, until the result is dropped."""


class NullSink:
    """Drops all bytes: for a reader that only verifies them."""

    def place(self, block: int) -> memoryview | None:
        return None

    def take(self, block: int, at: int, data: memoryview) -> None:
        pass

    def lock(self, buffer: mmap.mmap) -> object:
        return None


def consecutive_runs(layout: Layout, numbers: Iterable[int]) -> Iterator[list[int]]:
    """Yields ascending block ``numbers`` as runs of neighbours of about 8 MiB."""
    run: list[int] = []
    for number in numbers:
        _, stop = layout.blocks[number]
        if run and (number != run[-1] + 1 or stop - layout.blocks[run[0]][0] > _RUN_BYTES):
            yield run
            run = []
        run.append(number)
    if run:
        yield run


def reader_threads(*, in_memory: bool) -> int:
    """Returns how many threads read a shard: this process's share of the cores, at most 8.

    From elsewhere at least as many read as keep a disk or a connection busy.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    share = max(1, min(8, cores // env_count("LOCAL_WORLD_SIZE")))
    return share if in_memory else max(share, _STORAGE_READS)


def copy_from_address(place: memoryview, address: int) -> None:
    """Fills ``place`` from memory at ``address`` without the interpreter lock."""
    ctypes.memmove(ctypes.addressof(ctypes.c_char.from_buffer(place)), address, len(place))


class _Buffer:
    """Holds a thread's own page-aligned memory, used for one read after the other."""

    def __init__(self, sink: Sink) -> None:
        mapping = mmap.mmap(-1, _BUFFER_BYTES)
        self.data = memoryview(mapping)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
        self._locked = sink.lock(mapping)


class ShardReader:
    """Reads the file of one shard. Uses direct I/O for bytes outside of the page cache, if the file system allows it.

    Thread-safe, except for ``close``. ``nbytes`` counts the bytes read, header included.
    """

    def __init__(self, shard: OpenShard) -> None:
        self.shard = shard
        self.nbytes = 0
        self._lock = threading.Lock()
        self._local = threading.local()
        self._direct = -1 if shard.in_memory or shard.fd < 0 else _open_direct(shard.fd)
        self._resident = None if self._direct < 0 else _residency(shard.fd)

    def close(self) -> None:
        """Closes what the reader opened itself; the shard stays open."""
        if self._direct >= 0:
            os.close(self._direct)
            self._direct = -1

    def header_is_sound(self) -> bool:
        """True if the header has the checksum that the receipt gives. Raises OSError."""
        receipt = self.shard.receipt
        header = memoryview(bytearray(receipt.header_bytes))
        if self.shard.stream is not None:
            data = b"".join(self.shard.stream(0, receipt.header_bytes))
            self._count(len(data))
            return checksum(data) == receipt.header_checksum
        if self.shard.remote is not None:
            with self.shard.remote.ask(0, len(header)) as receive:
                self._receive(receive, [header])
        elif not self._fill([header], 0):
            return False
        return checksum(header) == receipt.header_checksum

    def read(self, run: list[int], sink: Sink) -> list[int]:
        """Reads a run of blocks into ``sink`` and returns the numbers of damaged ones.

        A block is damaged if it differs from its checksum, or the file ends before it does. Raises OSError when the
        file can't be read.
        """
        receipt = self.shard.receipt
        places = {number: sink.place(number) for number in run}
        if self.shard.stream is not None:
            return self._read_stream(self.shard.stream, run, places, sink)
        start = receipt.header_bytes + receipt.layout.blocks[run[0]][0]
        stop = receipt.header_bytes + receipt.layout.blocks[run[-1]][1]
        if self.shard.remote is not None:
            return self._read_remote(self.shard.remote, run, places, sink, (start, stop))
        resident = self._resident
        direct = resident is not None and not resident.holds(start, stop)
        if direct or None in places.values():
            return self._read_by_buffer(run, places, sink, partial(self._refill, direct=direct))
        return self._read_in_place(run, places, _PIECE_BYTES, self._fill)

    # -- into place: from memory, from the page cache, or from another node ---------------------------------------

    def _read_in_place(
        self, run: list[int], places: dict[int, Any], piece: int, fill: Callable[[list[memoryview], int], bool]
    ) -> list[int]:
        """Reads a run straight into place, ``piece`` bytes at a time. ``fill`` fills views, as ``_fill`` does."""
        receipt = self.shard.receipt
        blocks, bad = receipt.layout.blocks, []
        for group in _groups([(n, len(places[n])) for n in run], piece):
            views = [places[number][at:stop] for number, at, stop in group]
            offset = receipt.header_bytes + blocks[group[0][0]][0] + group[0][1]
            whole = fill(views, offset)
            for (number, at, stop), view in zip(group, views, strict=True):
                if at == 0:
                    state = xxhash.xxh3_64()
                state.update(view)
                if stop == len(places[number]) and state.hexdigest() != receipt.checksums[number]:
                    bad.append(number)
            if not whole:  # the file was truncated: this block and all after it are missing
                number, _, stop = group[-1]
                return bad + run[run.index(number) + (stop == len(places[number])) :]
        return bad

    # -- from another node ----------------------------------------------------------------------------------------

    def _read_remote(
        self, remote: Remote, run: list[int], places: dict[int, Any], sink: Sink, bounds: tuple[int, int]
    ) -> list[int]:
        """Reads a run, which lies between ``bounds`` in the file, with one request."""
        start, stop = bounds
        if None not in places.values():
            with remote.ask(start, stop) as receive:
                return self._read_in_place(
                    run, places, REMOTE_PIECE_BYTES, lambda views, _: self._receive(receive, views)
                )

        def refill(buffer: _Buffer, begin: int, stop: int) -> int:
            size = min(_BUFFER_BYTES, stop - begin)
            self._receive(receive, [buffer.data[:size]])
            return begin + size

        with remote.ask(start // PAGE * PAGE, stop) as receive:  # the buffer begins with a page
            return self._read_by_buffer(run, places, sink, refill)

    def _receive(self, receive: Receive, views: list[memoryview]) -> bool:
        receive(views)
        self._count(sum(map(len, views)))
        return True

    # -- as it arrives: from an object store --------------------------------------------------------------------------

    def _read_stream(self, stream: Stream, run: list[int], places: dict[int, Any], sink: Sink) -> list[int]:
        """Reads a run with one request, since its blocks are neighbours."""
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

    # -- through a buffer: direct I/O, or bytes without a place --------------------------------------------------

    def _read_by_buffer(
        self, run: list[int], places: dict[int, Any], sink: Sink, refill: Callable[[_Buffer, int, int], int]
    ) -> list[int]:
        """Reads a run by way of this thread's buffer. ``refill`` fills it, as ``_refill`` does."""
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
                    end = refill(buffer, begin, base + receipt.layout.blocks[run[-1]][1])
                    if end <= at:
                        return bad + run[run.index(number) :]
                place = places[number]
                # Without a place all that is there at once: each call takes the interpreter lock anew, for which the
                # threads of a restore to a device wait.
                size = min(stop, end, at + _PIECE_BYTES if place is not None else stop) - at
                piece = buffer.data[at - begin : at - begin + size]
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

    def _refill(self, buffer: _Buffer, begin: int, stop: int, *, direct: bool) -> int:
        """Fills the buffer from ``begin``, the start of a page, at most to ``stop``. Returns where its bytes end."""
        size = min(_BUFFER_BYTES, -(-(stop - begin) // PAGE) * PAGE)
        try:
            got = os.preadv(self._direct if direct else self.shard.fd, [buffer.data[:size]], begin)
        except OSError as error:
            if not direct or error.errno != errno.EINVAL:
                raise
            self._resident = None  # some file systems accept O_DIRECT at open() and refuse it at a read
            got = os.preadv(self.shard.fd, [buffer.data[:size]], begin)
        self._count(got)
        return min(begin + got, stop)

    def _fill(self, views: list[memoryview], offset: int) -> bool:
        """Fills all of ``views``. False if the file ends before."""
        while views:
            got = os.preadv(self.shard.fd, views, offset)
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


def _groups(sizes: list[tuple[int, int]], piece: int) -> Iterator[list[tuple[int, int, int]]]:
    """Groups neighbouring parts (block number, first byte, end) of blocks, each group for one read of a ``piece``."""
    group: list[tuple[int, int, int]] = []
    room = piece
    for number, size in sizes:
        at = 0
        while at < size:
            stop = min(size, at + room)
            group.append((number, at, stop))
            room -= stop - at
            at = stop
            if not room or len(group) == _MAX_VIEWS:
                yield group
                group, room = [], piece
    if group:
        yield group


def _open_direct(fd: int) -> int:
    """Opens the same file for direct I/O. Returns -1 where that isn't possible."""
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
    """Tells which parts of a file the page cache holds, through a mapping whose memory is never touched."""

    def __init__(self, mapping: mmap.mmap) -> None:
        self._mapping = mapping
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._mapping))
        self._mincore = getattr(ctypes.CDLL(None), "mincore", None)

    def holds(self, start: int, stop: int) -> bool:
        """True if the page cache holds all bytes from ``start`` to ``stop``."""
        if stop > len(self._mapping):  # the file was truncated since it was opened: the read will find out
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
    *,
    to_the_end: bool = False,
) -> list[int]:
    """Reads and verifies the blocks of these ascending numbers, and returns the numbers of damaged ones.

    Stops soon after the first damaged block unless ``to_the_end``. ``progress`` is called with byte counts, from
    several threads. Raises OSError when the file can't be read.
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

    threads = reader_threads(in_memory=reader.shard.in_memory) if reader.shard.stream is None else _REQUESTS
    if len(pieces) <= 1:  # starting a thread would take longer than the read
        work()
        return bad
    with ThreadPoolExecutor(threads, thread_name_prefix="rekindle-read") as pool:
        try:
            for future in [pool.submit(work) for _ in range(min(threads, len(pieces)))]:
                future.result()
        finally:
            stop.set()
    return sorted(bad)
