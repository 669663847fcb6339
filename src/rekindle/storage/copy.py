"""Copies a shard's bytes from memory to storage, verified against its receipt in the same pass."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator

import xxhash

from rekindle.common.failpoints import reach
from rekindle.errors import CorruptError
from rekindle.format.receipt import Receipt
from rekindle.storage.direct_io import UncachedFile
from rekindle.storage.throttle import Budget

__all__ = ["PIECE", "copy_shard", "verified_pieces", "write_pieces"]

PIECE = 4 << 20
"""Bytes hashed and then written in one go."""
_WRITERS = 4
"""Threads, each writing one piece while the next one is hashed."""
_AHEAD = 4
"""Pieces that are ready to be written, so that the disk has work while the hashing waits for a core."""


def copy_shard(
    receipt: Receipt, source: memoryview, file: UncachedFile, progress: Callable[[int], object], budget: Budget
) -> None:
    """Writes the shard ``source``, header included, to ``file``. ``progress`` is given byte counts.

    Raises CorruptError at the first block that differs from its checksum, and OSError when the file can't be written.
    The file is useless after either error.
    """
    for nbytes in write_pieces(verified_pieces(receipt, source, budget), file):
        progress(nbytes)
        reach("drain.copying", receipt.stamp.step)


def write_pieces(pieces: Iterator[tuple[memoryview, int]], file: UncachedFile) -> Iterator[int]:
    """Writes pieces at their offsets, several at a time. Yields byte counts; raises the first error."""
    with _Writers(file) as writers:
        yield from writers.write(pieces)


def verified_pieces(receipt: Receipt, source: memoryview, budget: Budget) -> Iterator[tuple[memoryview, int]]:
    """Yields pieces of the source and their offsets, in whole pages, each hashed and paid for from the budget.

    Checksums end where tensors do, not where pages do: the last block of a piece may be compared only with the next
    piece, after it was yielded. Raises CorruptError.
    """
    hashing = _Hashing(receipt, source)
    at = 0
    while at < receipt.file_bytes:
        stop = min(at + budget.piece(PIECE), receipt.file_bytes)
        hashing.hash_to(stop)
        budget.take(stop - at)
        yield source[at:stop], at
        at = stop


class _Hashing:
    """Hashes the source from its start on, and compares at the end of each of the receipt's blocks."""

    def __init__(self, receipt: Receipt, source: memoryview) -> None:
        self._receipt, self._source = receipt, source
        self._state = xxhash.xxh3_64()
        self._block = -1
        """Number of the block being hashed; -1 is the header."""
        self._at, self._stop = 0, receipt.header_bytes

    def hash_to(self, to: int) -> None:
        """Hashes up to byte ``to``. Raises CorruptError."""
        while self._at < to:
            until = min(to, self._stop)
            self._state.update(self._source[self._at : until])  # outside of the interpreter lock
            self._at = until
            if until == self._stop:
                self._compare()

    def _compare(self) -> None:
        receipt, number = self._receipt, self._block
        if self._state.hexdigest() != (receipt.header_checksum if number < 0 else receipt.checksums[number]):
            what = "the header" if number < 0 else f"tensor {receipt.layout.tensor_of(number)!r}"
            raise CorruptError(
                f"step {receipt.stamp.step}, rank {receipt.stamp.rank}: {what} differs from its checksum"
            )
        self._block += 1
        if self._block < len(receipt.checksums):
            self._stop = receipt.header_bytes + receipt.layout.blocks[self._block][1]
            self._state.reset()


class _Writers:
    """Threads that write pieces while the caller's thread hashes the next ones. Leaving the context joins them."""

    def __init__(self, file: UncachedFile) -> None:
        self._file = file
        self._todo: queue.SimpleQueue[tuple[memoryview, int] | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[int | BaseException] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []

    def __enter__(self) -> _Writers:
        try:
            for number in range(_WRITERS):
                # A daemon, like the draining thread of a trainer: neither keeps a trainer from ending.
                thread = threading.Thread(target=self._work, name=f"rekindle-write-{number}", daemon=True)
                thread.start()
                self._threads.append(thread)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        for _ in self._threads:
            self._todo.put(None)
        for thread in self._threads:
            thread.join()
        while not self._done.empty():  # errors, whose tracebacks have this object: cycles as below
            self._done.get()

    def write(self, pieces: Iterator[tuple[memoryview, int]]) -> Iterator[int]:
        """Writes all pieces. Yields byte counts as they are written; raises the first writer's error."""
        under_way = 0
        for piece in pieces:
            self._todo.put(piece)
            under_way += 1
            while under_way > _WRITERS + _AHEAD or not self._done.empty():
                yield self._result()
                under_way -= 1
        for _ in range(under_way):
            yield self._result()

    def _result(self) -> int:
        result = self._done.get()
        if not isinstance(result, BaseException):
            return result
        try:
            raise result
        finally:
            # Its traceback has this frame: a cycle, which keeps the bytes, and the pin of their snapshot, until garbage
            # is collected. Memory would have no room for the next save meanwhile.
            del result

    def _work(self) -> None:
        while (piece := self._todo.get()) is not None:
            data, offset = piece
            try:
                self._file.write(data, offset)
                self._done.put(len(data))
            except BaseException as error:
                self._done.put(error)
