"""Reads a checkpoint of any number of ranks as whole tensors. Compares every byte with its checksum."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch

from rekindle.errors import CorruptError, NotFoundError
from rekindle.format.boxes import Box
from rekindle.format.layout import DTYPES, Chunk, block_ranges
from rekindle.format.reader import NullSink, ShardReader, read_blocks
from rekindle.format.receipt import Receipt
from rekindle.format.shard import OpenShard
from rekindle.restore.reshard import Have, Want, plan, runs
from rekindle.state.strides import SAME_SIZE
from rekindle.state.tree import entries
from rekindle.storage.catalog import STORAGE, StoredCopy
from rekindle.storage.verify import check_manifest
from rekindle.transfer.merge import Merged, Whole, extract_part, find_tensors, merge
from rekindle.transfer.staging import lay_out, map_scratch, tensor_view

__all__ = ["Item", "Shards", "nbytes"]

_BATCH = 64 << 20
"""Bytes of chunks that are read into scratch memory at a time, before their rows are copied to their places."""


class Item(NamedTuple):
    """A tensor to export."""

    key: str
    """Path of its place in the exported structure, with dots between keys; the first place of a tied tensor."""
    name: str
    """Path of its place in the state, by which it will be stored when it is imported again."""
    whole: Whole


def nbytes(whole: Whole) -> int:
    """Returns the bytes of a whole tensor."""
    return math.prod(whole.shape) * DTYPES[whole.dtype][1]


class Shards:
    """All shards of one copy of a checkpoint, or its entry ``only``. A context manager.

    A copy in memory is pinned until the end. Raises CorruptError when something is damaged or missing, NotFoundError
    when there is no such entry, or when the copy has been recycled.
    """

    def __init__(self, copy: StoredCopy, only: str | None = None) -> None:
        self.copy = copy
        self._pins = ExitStack()
        self._pinned: dict[int, OpenShard] = {}
        try:
            self._receipts = self._open_all()
            merged = merge(self._receipts)
            wanted = merged.structure if only is None else _entry(merged, only, copy.step)
            self.items = _items(wanted, only, merged, copy.step)
            names = {item.whole.name: item.name for item in self.items}
            self.structure, self.values = extract_part(wanted if only is None else {only: wanted}, merged.values, names)
            """Structure and values of what is exported, with the items' names. The values are typed JSON."""
            self._moves = self._plan()
        except BaseException:
            self.close()
            raise

    @cached_property
    def reads(self) -> int:
        """Number of bytes that ``read`` will read."""
        return sum(self._chunk(rank, index).nbytes for rank, of in self._moves.items() for index in of)

    @property
    def nbytes(self) -> int:
        """Number of bytes of all tensors."""
        return sum(nbytes(item.whole) for item in self.items)

    def gather(
        self, aside: Path, progress: Callable[[int], object]
    ) -> tuple[dict[str, torch.Tensor], dict[str, memoryview]]:
        """Returns all tensors by the items' names, each in a storage of its own, and their memory by key.

        The memory is that of an unnamed file in the directory ``aside``. Raises what ``read`` raises.
        """
        slices, size = lay_out({item.key: nbytes(item.whole) for item in self.items})
        memory = map_scratch(aside, size)
        places = {key: memory[at] for key, at in slices.items()}
        self.read(places, aside, progress)
        tensors = {
            item.name: tensor_view(places[item.key], getattr(torch, item.whole.dtype), item.whole.shape)
            for item in self.items
        }
        return tensors, places

    def _open_all(self) -> list[Receipt]:
        if self.copy.place == STORAGE:
            for problem in check_manifest(self.copy.files):
                raise problem
        found = []
        for rank in range(self.copy.world):
            shard = self._open(rank)
            if shard.receipt.stamp.checkpoint != self.copy.checkpoint or shard.receipt.stamp.rank != rank:
                shard.close()
                if self.copy.place != STORAGE:
                    raise _replaced(shard.path)
                raise CorruptError(f"{shard.path}: belongs to another checkpoint")
            found.append(shard.receipt)
            if self.copy.place == STORAGE:  # there may be more ranks than files that a process may open
                shard.close()
            else:
                self._pinned[rank] = self._pins.enter_context(shard)
        return found

    def _open(self, rank: int) -> OpenShard:
        try:
            return self.copy.files.shard(rank, self.copy.world)
        except FileNotFoundError as error:
            if self.copy.place == STORAGE:
                raise CorruptError(f"{error.filename}: is missing") from None
            raise _replaced(error.filename) from None

    def _chunk(self, rank: int, index: int) -> Chunk:
        return self._receipts[rank].layout.chunks[index]

    def _plan(self) -> dict[int, dict[int, list[tuple[Item, Box]]]]:
        """Maps each rank and chunk to the boxes that are read from there. Raises CorruptError for a missing part."""
        wants = [Want(item.whole.name, item.whole.box) for item in self.items]
        parts = [(item.whole.name, part) for item in self.items for part in item.whole.parts]
        found = plan(wants, [Have(name, part.box) for name, part in parts])
        for want in found.missing:
            raise CorruptError(f"step {self.copy.step}: no shard has {want.box} of tensor {want.name!r}")
        moves: dict[int, dict[int, list[tuple[Item, Box]]]] = {}
        for move in found.moves:
            part = parts[move.have][1]
            moves.setdefault(part.receipt, {}).setdefault(part.chunk, []).append((self.items[move.want], move.box))
        return moves

    def read(self, places: Mapping[str, memoryview], aside: Path, progress: Callable[[int], object]) -> None:
        """Reads each item's bytes, in row-major order, into the memory that ``places`` has for its key.

        ``progress`` is given byte counts. Parts of rows go through unnamed files in the directory ``aside``. Raises
        CorruptError at the first wrong byte.
        """
        for rank, chunks in sorted(self._moves.items()):
            shard = self._pinned.get(rank) or self._open(rank)
            try:
                if shard.receipt.raw != self._receipts[rank].raw:
                    raise CorruptError(f"{shard.path}: has been replaced meanwhile")
                self._read_shard(shard, chunks, places, aside, progress)
            finally:
                if rank not in self._pinned:
                    shard.close()

    def _read_shard(
        self,
        shard: OpenShard,
        chunks: Mapping[int, list[tuple[Item, Box]]],
        places: Mapping[str, memoryview],
        aside: Path,
        progress: Callable[[int], object],
    ) -> None:
        layout = shard.receipt.layout
        straight: dict[int, memoryview] = {}
        rows: list[int] = []
        for index, moves in chunks.items():
            place = _in_one_piece(layout.chunks[index], moves, places)
            if place is not None:
                straight[index] = place
            elif layout.chunks[index].nbytes:
                rows.append(index)
        reader = ShardReader(shard)
        try:
            _read_chunks(reader, straight, progress)
            for batch in _batches(rows, [chunk.nbytes for chunk in layout.chunks]):
                slices, size = lay_out({index: layout.chunks[index].nbytes for index in batch})
                memory = map_scratch(aside, size)
                _read_chunks(reader, {index: memory[slices[index]] for index in batch}, progress)
                for index in batch:
                    for item, box in chunks[index]:
                        _copy(box, layout.chunks[index], memory[slices[index]], item.whole, places[item.key])
        finally:
            reader.close()

    def close(self) -> None:
        """Unpins the copy."""
        self._pins.close()

    def __enter__(self) -> Shards:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _entry(merged: Merged, only: str, step: int) -> Any:
    there = entries(merged.structure)
    if only not in there:
        known = ", ".join(map(str, there)) or "nothing"
        raise NotFoundError(f"step {step} has no entry {only!r} in its state: it has {known}")
    return there[only]


def _items(structure: Any, only: str | None, merged: Merged, step: int) -> list[Item]:
    """Lists all tensors of a structure, each once, in its order."""
    keys: dict[str, str] = {}
    taken = set()
    for path, name in find_tensors(structure):
        if name not in merged.tensors:
            raise CorruptError(f"step {step}: no shard has any of tensor {name!r}")
        if name not in keys:
            while path in taken:  # {"a.b": x, "a": {"b": y}} are two tensors
                path += "~"
            keys[name] = path
            taken.add(path)
    return [Item(key, key if only is None else f"{only}.{key}", merged.tensors[name]) for name, key in keys.items()]


def _in_one_piece(chunk: Chunk, moves: list[tuple[Item, Box]], places: Mapping[str, memoryview]) -> memoryview | None:
    """Returns the memory that takes a chunk's bytes in one piece; None where its rows go to different places."""
    ((item, box), *more) = moves
    here = chunk.box
    if more or box != here:
        return None
    ((_, to, length), *more_runs) = list(_first(runs(box, here, item.whole.box, DTYPES[chunk.dtype][1]), 2))
    return None if more_runs else places[item.key][to : to + length]


def _first(found: Iterable[tuple[int, int, int]], count: int) -> Iterator[tuple[int, int, int]]:
    return (each for each, _ in zip(found, range(count), strict=False))


def _batches(indices: Iterable[int], sizes: list[int]) -> Iterator[list[int]]:
    """Groups chunks that are read into scratch memory together."""
    batch: list[int] = []
    total = 0
    for index in indices:
        if batch and total + sizes[index] > _BATCH:
            yield batch
            batch, total = [], 0
        batch.append(index)
        total += sizes[index]
    if batch:
        yield batch


def _copy(box: Box, chunk: Chunk, source: memoryview, whole: Whole, target: memoryview) -> None:
    """Copies ``box`` of a tensor from a chunk of it to the memory of the whole tensor."""
    kind = SAME_SIZE[DTYPES[chunk.dtype][1]]
    there, here = tensor_view(target, kind, whole.shape), tensor_view(source, kind, chunk.sizes)
    for d, (at, size, first) in enumerate(zip(box.offsets, box.sizes, chunk.offsets, strict=True)):
        there, here = there.narrow(d, at, size), here.narrow(d, at - first, size)
    there.copy_(here)


class _Places(NullSink):
    """A sink that puts the blocks of some chunks of a shard into the memory of each chunk."""

    def __init__(self, chunks: Iterable[Chunk], places: Mapping[int, memoryview]) -> None:
        self.blocks: dict[int, memoryview] = {}
        number = 0
        for index, chunk in enumerate(chunks):
            for start, stop in block_ranges(chunk):
                if index in places:
                    self.blocks[number] = places[index][start - chunk.start : stop - chunk.start]
                number += 1

    def place(self, block: int) -> memoryview | None:
        return self.blocks[block]


def _read_chunks(reader: ShardReader, places: Mapping[int, memoryview], progress: Callable[[int], object]) -> None:
    """Reads chunks into their places. Raises CorruptError at the first wrong byte."""
    sink = _Places(reader.shard.receipt.layout.chunks, places)
    for block in read_blocks(reader, sink, sink.blocks, progress):
        raise reader.shard.corruption(block)


def _replaced(path: object) -> NotFoundError:
    return NotFoundError(f"{path}: a newer step has just taken its place; try again")
