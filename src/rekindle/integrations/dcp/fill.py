"""From a shard into the tensors that DCP's planner names: only the blocks that they need, each one verified."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch.distributed.checkpoint.planner import ReadItem

from rekindle.errors import CorruptError, NotFoundError, StateMismatchError
from rekindle.integrations.dcp.checkpoint import Shard
from rekindle.integrations.dcp.items import copyable, settled
from rekindle.snapshot.layout import BLOCK, Chunk, Layout, blocks
from rekindle.snapshot.pieces import Nowhere, Reader, pour
from rekindle.snapshot.shard import OpenShard
from rekindle.storage.catalog import MEMORY

__all__ = ["Read", "fill"]

log = logging.getLogger("rekindle")

_PARKED = 256 << 20
"""Bytes that may wait at a time to be put into order by torch; one tensor's may be more."""


@dataclass
class Read:
    """One item of DCP's plan."""

    item: ReadItem
    number: int
    """Of its chunk, in the shard."""
    target: torch.Tensor


def fill(shard: Shard, reads: list[Read]) -> None:
    """Fill all targets from one rank's shard. Raises CorruptError when no copy has sound bytes for one of them."""
    starts = _first_blocks(shard.receipt.layout)
    for wave in _waves(_Window(read, shard.receipt.layout.chunks[read.number]) for read in reads):
        sink = _Sink(shard.receipt.layout, wave, starts)
        _pour(shard, sink)
        for window in wave:
            window.close()


def _first_blocks(layout: Layout) -> list[int]:
    """Number of each chunk's first block."""
    starts, at = [], 0
    for chunk in layout.chunks:
        starts.append(at)
        at += len(blocks(chunk))
    return starts


def _waves(windows: Iterable[_Window]) -> Iterator[list[_Window]]:
    wave: list[_Window] = []
    parked = 0
    for window in windows:
        if window.nbytes:
            wave.append(window)
            parked += window.parks
        if parked > _PARKED:
            yield wave
            wave, parked = [], 0
    if wave:
        yield wave


def _pour(shard: Shard, sink: _Sink) -> None:
    """Read the blocks of ``sink`` from the nearest copy; what is damaged there, from the next one."""
    left, problems = sorted(sink.windows), []
    gone = True
    for place, path in shard.places():
        try:
            with OpenShard.open(path, in_memory=place == MEMORY) as opened:
                if opened.receipt.checksums != shard.receipt.checksums or opened.receipt.stamp.key != (
                    shard.receipt.stamp.key
                ):
                    raise FileNotFoundError(f"{path}: another step has taken its place")
                reader = Reader(opened)
                try:
                    bad = pour(reader, sink, left, to_the_end=True)
                finally:
                    reader.close()
        except (OSError, CorruptError) as error:
            gone = gone and isinstance(error, FileNotFoundError)
            problems.append(f"{place}: {error}")
            continue
        if not bad:
            for problem in problems:
                log.warning("step %d: read from %s instead: %s", shard.receipt.stamp.step, place, problem)
            return
        gone, left = False, bad
        problems.append(f"{place}: {opened.complain(bad[0])}")
    why = f"step {shard.receipt.stamp.step} can't be loaded: {'; '.join(problems)}"
    raise NotFoundError(why) if gone else CorruptError(why)


class _Window:
    """The bytes of a shard between the first and the last one that a read wants, and where they go.

    Straight into the target if they lie there as they do in the shard, else into memory of which torch then copies
    what is wanted: from a column, to a device, or into another dtype.
    """

    def __init__(self, read: Read, chunk: Chunk) -> None:
        lengths = tuple(read.item.lengths)
        if tuple(read.target.shape) != lengths:
            raise StateMismatchError(
                f"{read.item.dest_index.fqn}: {lengths} are to be loaded into a tensor of {tuple(read.target.shape)}"
            )
        self.number, self.chunk, self._target = read.number, chunk, settled(read.target)
        dtype: torch.dtype = getattr(torch, chunk.dtype)
        steps = [1] * len(lengths)
        for d in range(len(lengths) - 1, 0, -1):
            steps[d - 1] = steps[d] * chunk.sizes[d]
        first = sum(at * step for at, step in zip(read.item.storage_offsets, steps, strict=True))
        span = sum((size - 1) * step for size, step in zip(lengths, steps, strict=True)) + 1
        self.nbytes = span * dtype.itemsize if 0 not in lengths else 0
        self.start = chunk.start + first * dtype.itemsize
        self.stop = self.start + self.nbytes
        self._parked: torch.Tensor | None = None
        self.memory = memoryview(b"")
        if not self.nbytes:
            return
        if span == self._target.numel() and _takes_bytes(self._target, dtype):
            self.memory = _bytes_of(self._target)
        else:
            flat = torch.empty(span, dtype=dtype)
            self.memory, self._parked = _bytes_of(flat), flat.as_strided(lengths, steps)

    @property
    def parks(self) -> int:
        return self.nbytes if self._parked is not None else 0

    def part(self, start: int, stop: int) -> memoryview:
        """Where the shard's bytes from ``start`` to ``stop`` go."""
        return self.memory[start - self.start : stop - self.start]

    def close(self) -> None:
        """All bytes are there and sound."""
        if self._parked is not None:
            self._target.copy_(self._parked)
            self._parked = None
        elif not self._target.is_inference():
            torch.autograd.graph.increment_version(self._target)  # what was written past torch is told to autograd
        self.memory = memoryview(b"")


class _Sink(Nowhere):
    """Windows by the blocks that they need."""

    def __init__(self, layout: Layout, windows: list[_Window], starts: list[int]) -> None:
        self._blocks = layout.blocks
        self.windows: dict[int, list[_Window]] = {}
        for window in windows:
            at = window.chunk.start
            for block in range((window.start - at) // BLOCK, -(-(window.stop - at) // BLOCK)):
                self.windows.setdefault(starts[window.number] + block, []).append(window)

    def place(self, block: int) -> memoryview | None:
        start, stop = self._blocks[block]
        window = self.windows[block][0]
        alone = len(self.windows[block]) == 1 and window.start <= start and stop <= window.stop
        return window.part(start, stop) if alone else None

    def take(self, block: int, at: int, data: memoryview) -> None:
        begin = self._blocks[block][0] + at
        for window in self.windows[block]:
            low, high = max(begin, window.start), min(begin + len(data), window.stop)
            if low < high:
                window.part(low, high)[:] = data[low - begin : high - begin]


def _takes_bytes(tensor: torch.Tensor, dtype: torch.dtype) -> bool:
    return (
        tensor.device.type == "cpu"
        and tensor.dtype == dtype
        and tensor.is_contiguous()
        and copyable(tensor)
        and not (tensor.is_conj() or tensor.is_neg())
    )


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous tensor on the host. The caller keeps the tensor."""
    return memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")
