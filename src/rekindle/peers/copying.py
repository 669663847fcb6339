"""Copies a shard, or some chunks of it, from the memory of another node into this one's, each block verified."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Sequence

from rekindle.format.layout import Chunk, Layout
from rekindle.format.reader import NullSink, ShardReader, read_blocks
from rekindle.format.receipt import Receipt
from rekindle.format.shard import OpenShard
from rekindle.memory.copies import CopySlots

__all__ = ["copy_shard"]


def copy_shard(
    shard: OpenShard, chunks: Sequence[Chunk], slots: CopySlots, take: Callable[[int], object] = lambda nbytes: None
) -> float:
    """Commits a copy of a shard, reduced to ``chunks`` of it, with all of its values.

    ``take`` is called before each block is read, with its bytes; what it raises ends the copy, and nothing of it stays.
    Returns the seconds in which blocks were read, without those in which all threads waited in ``take``. Raises
    OSError when the other node fails, CorruptError when a block is damaged twice, MemoryStoreError without room.
    """
    watch = _Stopwatch()
    receipt, layout = shard.receipt, Layout.build(chunks)
    blocks = _blocks_of(receipt.layout, layout)
    values = json.dumps(receipt.values, separators=(",", ":"), allow_nan=False).encode()

    def fill(data: memoryview) -> list[str]:
        places = {block: data[start:stop] for block, (start, stop) in zip(blocks, layout.blocks, strict=True)}
        _read(shard, places, take, watch)
        return [receipt.checksums[block] for block in blocks]

    def encode(checksums: list[str]) -> bytes:
        return Receipt.encode(receipt.stamp, Receipt.static_part(layout, receipt.structure), checksums, values)

    slots.write(receipt.stamp, layout, fill, encode)
    return watch.seconds


def _blocks_of(whole: Layout, reduced: Layout) -> list[int]:
    """Returns for each block of a reduced layout its number in the whole one. Both divide a chunk alike."""
    first, block = {}, 0
    for chunk in whole.chunks:
        first[chunk.name, chunk.offsets, chunk.sizes] = block
        block += chunk.block_count
    numbers: list[int] = []
    for chunk in reduced.chunks:
        start = first[chunk.name, chunk.offsets, chunk.sizes]
        numbers += range(start, start + chunk.block_count)
    return numbers


def _read(shard: OpenShard, places: dict[int, memoryview], take: Callable[[int], object], watch: _Stopwatch) -> None:
    reader = ShardReader(shard)
    sink = _Places(places, take, watch)
    for block in read_blocks(reader, sink, sorted(places), lambda nbytes: watch.leave(), to_the_end=True):
        if reader.read([block], _Places(places, take, watch)):  # it may have been damaged on the way only
            raise shard.corruption(block)
        watch.leave()


class _Places(NullSink):
    """Puts each block where it belongs in the copy, after ``take``, which one thread at a time calls."""

    def __init__(self, places: dict[int, memoryview], take: Callable[[int], object], watch: _Stopwatch) -> None:
        self._places, self._take, self._watch = places, take, watch
        self._lock = threading.Lock()

    def place(self, block: int) -> memoryview | None:
        self._watch.leave()
        with self._lock:
            self._take(len(self._places[block]))
        self._watch.enter()
        return self._places[block]


class _Stopwatch:
    """Adds up the seconds in which at least one thread reads. Safe to use from any thread."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._lock = threading.Lock()
        self._reading: set[int] = set()
        self._since = 0.0

    def enter(self) -> None:
        """Counts the calling thread as one that reads."""
        with self._lock:
            if not self._reading:
                self._since = time.monotonic()
            self._reading.add(threading.get_ident())

    def leave(self) -> None:
        """Counts the calling thread no more."""
        with self._lock:
            if threading.get_ident() in self._reading:
                self._reading.remove(threading.get_ident())
                if not self._reading:
                    self.seconds += time.monotonic() - self._since
