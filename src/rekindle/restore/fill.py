"""Fills tensors from the blocks of shards: bytes go straight into place where they can."""

from __future__ import annotations

import ctypes
import math
import mmap
import threading
from itertools import islice

import torch

from rekindle.devices.streams import ThreadStreams
from rekindle.devices.table import on_host
from rekindle.format.boxes import Box
from rekindle.format.layout import BLOCK, DTYPES, Chunk, Layout, block_ranges
from rekindle.restore.reshard import runs
from rekindle.state.parts import dtype_name

__all__ = ["Filling"]


class Filling:
    """The ``Sink`` of one shard: passes its blocks on to the tensors that want a part of them."""

    def __init__(self, layout: Layout, streams: ThreadStreams) -> None:
        self._layout = layout
        self._first: list[int] = []
        """By chunk: the number of its first block."""
        self._numbers: list[int] = []
        """By block: the number of its chunk."""
        for number, chunk in enumerate(layout.chunks):
            self._first.append(len(self._numbers))
            self._numbers += [number] * len(block_ranges(chunk))
        self._windows: dict[int, list[_Window]] = {}
        self.staged = 0
        """Bytes that will wait on the host until ``finish``."""
        self._streams = streams

    def want(self, chunk: int, common: Box, box: Box, tensor: torch.Tensor) -> None:
        """Asks for ``common``, a part of the shard's chunk of this number, in ``tensor``, which holds ``box``."""
        source = self._layout.chunks[chunk]
        window = _straight(source, common, box, tensor)
        if window is None:
            window = _Staged(source, common, box, tensor)
            self.staged += window.stop - window.start
        self._windows.setdefault(chunk, []).append(window)

    @property
    def blocks(self) -> list[int]:
        """Numbers of the blocks that hold anything wanted, ascending."""
        found: set[int] = set()
        for chunk, windows in self._windows.items():
            for window in windows:
                first, last = window.start // BLOCK, -(-window.stop // BLOCK)
                found.update(range(self._first[chunk] + first, self._first[chunk] + last))
        return sorted(found)

    @property
    def nbytes(self) -> int:
        return sum(stop - start for start, stop in (self._layout.blocks[number] for number in self.blocks))

    # -- as a sink ----------------------------------------------------------------------------------------------

    def _range(self, block: int) -> tuple[int, int, int]:
        """Returns chunk, first byte and last, exclusive, within it."""
        number = self._numbers[block]
        start = (block - self._first[number]) * BLOCK
        return number, start, min(start + BLOCK, self._layout.chunks[number].nbytes)

    def place(self, block: int) -> memoryview | None:
        number, start, stop = self._range(block)
        windows = [w for w in self._windows.get(number, []) if w.start < stop and start < w.stop]
        if len(windows) == 1 and windows[0].start <= start and stop <= windows[0].stop:
            return windows[0].place(start, stop)
        return None

    def take(self, block: int, at: int, data: memoryview) -> None:
        number, start, _ = self._range(block)
        start += at
        stop = start + len(data)
        for window in self._windows.get(number, []):
            first, last = max(start, window.start), min(stop, window.stop)
            if first < last:
                window.put(first, data[first - start : last - start], self._streams)

    def lock(self, buffer: mmap.mmap) -> object:
        return self._streams.page_lock(buffer)

    def finish(self) -> None:
        """Copies staged rows into place, and tells autograd what has been written past torch."""
        with torch.no_grad():
            for windows in self._windows.values():
                for window in windows:
                    window.finish()


class _Window:
    """Bytes ``start`` to ``stop`` of a chunk, which lie in one piece in ``tensor`` from ``at`` on."""

    def __init__(self, start: int, stop: int, tensor: torch.Tensor, at: int) -> None:
        self.start, self.stop = start, stop
        self._tensor, self._at = tensor, at
        self._memory = _bytes_of(tensor) if on_host(tensor) else None
        self._flat = tensor.view(-1).view(torch.uint8) if self._memory is None else None

    def place(self, start: int, stop: int) -> memoryview | None:
        if self._memory is None:
            return None
        return self._memory[self._at + start - self.start : self._at + stop - self.start]

    def put(self, start: int, data: memoryview, streams: ThreadStreams) -> None:
        place = self.place(start, start + len(data))
        if place is not None:
            place[:] = data
            return
        assert self._flat is not None
        at = self._at + start - self.start
        streams.copy(self._flat[at : at + len(data)], torch.frombuffer(data, dtype=torch.uint8))

    def finish(self) -> None:
        if not self._tensor.is_inference():
            torch.autograd.graph.increment_version(self._tensor)


class _Staged(_Window):
    """Rows of a chunk, held on the host until torch copies a part of them into place."""

    def __init__(self, chunk: Chunk, common: Box, box: Box, tensor: torch.Tensor) -> None:
        rest = chunk.sizes[1:]
        row = math.prod(rest) * DTYPES[chunk.dtype][1]
        first = common.offsets[0] - chunk.offsets[0] if rest or common.offsets else 0
        count = common.sizes[0] if common.sizes else 1
        self._shape = (count, *rest) if common.sizes else ()
        self._dtype = getattr(torch, chunk.dtype)
        self._inner = [
            (o - c, s) for o, c, s in zip(common.offsets[1:], chunk.offsets[1:], common.sizes[1:], strict=True)
        ]
        self._to = tensor
        self._from: torch.Tensor | None = None
        self._outer = [(o - b, s) for o, b, s in zip(common.offsets, box.offsets, common.sizes, strict=True)]
        self._lock = threading.Lock()
        self.start, self.stop = first * row, (first + count) * row

    def place(self, start: int, stop: int) -> memoryview | None:
        with self._lock:
            if self._from is None:
                self._from = torch.empty(self._shape, dtype=self._dtype, device="cpu")
        return _bytes_of(self._from)[start - self.start : stop - self.start]

    def finish(self) -> None:
        if self._from is None:
            return
        source, target = self._from, self._to
        for d, (at, size) in enumerate(self._inner, 1):
            source = source.narrow(d, at, size)
        for d, (at, size) in enumerate(self._outer):
            target = target.narrow(d, at, size)
        target.copy_(source)
        self._from = None


def _straight(chunk: Chunk, common: Box, box: Box, tensor: torch.Tensor) -> _Window | None:
    """Returns a window onto the tensor's own memory.

    None where the wanted bytes don't lie in one piece on both sides, or the tensor has another type.
    """
    if not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg() or dtype_name(tensor) != chunk.dtype:
        return None
    source = chunk.box
    found = list(islice(runs(common, source, box, DTYPES[chunk.dtype][1]), 2))
    if len(found) != 1:
        return None
    start, at, nbytes = found[0]
    return _Window(start, start + nbytes, tensor, at)


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    """Returns the memory of a contiguous tensor on the host. The caller keeps the tensor."""
    if not tensor.nbytes:
        return memoryview(bytearray())
    return memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")
