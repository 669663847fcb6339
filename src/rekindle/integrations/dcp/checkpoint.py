"""A checkpoint as DCP wants to see it: found in memory or on storage, whole, and described by DCP's ``Metadata``."""

from __future__ import annotations

import errno
import io
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from rekindle.errors import CorruptError, FormatError, NotFoundError
from rekindle.integrations.dcp.items import Path as Way
from rekindle.integrations.dcp.run import Key
from rekindle.snapshot.documents import Receipt
from rekindle.snapshot.layout import Chunk
from rekindle.snapshot.lineage import retired
from rekindle.snapshot.memory import JobDir
from rekindle.snapshot.names import MANIFEST, receipt_name
from rekindle.state.codec import decode
from rekindle.state.reshard import Box, Have, Want, plan
from rekindle.state.tree import assemble, entries
from rekindle.storage.catalog import STORAGE, Copy, survey
from rekindle.storage.posix import PosixStore
from rekindle.storage.verify import check_manifest

__all__ = ["Checkpoint", "Shard", "Stored", "find"]

log = logging.getLogger("rekindle")


_LOOKS = 3
"""Times that a checkpoint is looked for while files come and go."""


@dataclass
class Shard:
    """One rank's part, and the copies of it that seem whole, the nearest first: store and receipt of each."""

    rank: int
    receipt: Receipt
    copies: list[tuple[str, Path]]
    look: Callable[[], list[Copy]]
    """Lists all copies of all checkpoints anew."""

    def places(self) -> Iterator[tuple[str, Path]]:
        """The copies, and then those that have come, or been given another name, since they were listed."""
        yield from self.copies
        for copy in self.look():
            here = copy.place, copy.path / receipt_name(self.rank, copy.world)
            if copy.key == self.receipt.stamp.key and self.rank in copy.ranks and here not in self.copies:
                yield here


@dataclass
class Stored:
    """A box of a tensor, and the ranks that have it: several, where Rekindle itself has saved replicas."""

    chunk: Chunk
    places: dict[int, int] = field(default_factory=dict)
    """By rank: number of the chunk in the rank's shard."""


# -- finding ---------------------------------------------------------------------------------------------------------


def find(root: Path, job: JobDir, step: int | None) -> Checkpoint:
    """The newest whole checkpoint that this process can see, or that of ``step``. No tensor is read.

    Raises NotFoundError when there is none, CorruptError when a part of it is missing or damaged.
    """
    job.check()
    look = partial(_survey, root, job)
    for _ in range(_LOOKS):
        try:
            return _find(root, look, step)
        except _Gone as error:
            gone = error
    raise CorruptError(str(gone))


class _Gone(CorruptError):
    """A file is missing: perhaps it has only been renamed, or its memory used again, since it was listed."""


def _find(root: Path, look: Callable[[], list[Copy]], step: int | None) -> Checkpoint:
    copies = look()
    seen = {copy.incarnation for copy in copies}
    found: dict[Key, list[Copy]] = {}
    for copy in copies:
        if not retired(copy.step, copy.incarnation, seen):
            found.setdefault(copy.key, []).append(copy)
    whole = {key: parts for key, parts in found.items() if not _lacking(parts)}
    chosen = max((key for key in whole if step in (None, key[0])), default=None)
    if chosen is None:
        raise NotFoundError(_why_none(root, found, step))
    parts = found[chosen]
    try:
        shards = [_shard(chosen, parts, rank, look) for rank in range(parts[0].world)]
        return Checkpoint(root, chosen, shards)
    except CorruptError as error:
        others = sorted({key[0] for key in whole} - {chosen[0]}, reverse=True)
        if step is not None or not others:
            raise
        raise type(error)(
            f"{error}; there are older checkpoints, to be asked for by checkpoint_id: {others}"
        ) from error


def _survey(root: Path, job: JobDir) -> list[Copy]:
    try:
        return survey(job, PosixStore(root))
    except OSError as error:
        copies = survey(job, None)
        why = f"{root} can't be listed: {error.strerror or error}"
        if not copies:
            raise NotFoundError(f"nothing to load in memory, and {why}") from error
        log.warning("only what is in memory can be loaded: %s", why)
        return copies


def _lacking(parts: list[Copy]) -> list[int]:
    return sorted(set(range(parts[0].world)).difference(*(copy.ranks for copy in parts)))


def _why_none(root: Path, found: dict[Key, list[Copy]], step: int | None) -> str:
    parts = next((parts for key, parts in found.items() if key[0] == step), None)
    if parts is not None:
        return (
            f"{root}: step {step} is not whole, the shards of ranks {_lacking(parts)} of {parts[0].world} are missing"
        )
    known = sorted({key[0] for key, parts in found.items() if not _lacking(parts)})
    return (
        f"{root}: no checkpoint" + ("" if step is None else f" of step {step}") + (f"; there are {known}" * bool(known))
    )


def _shard(key: Key, parts: list[Copy], rank: int, look: Callable[[], list[Copy]]) -> Shard:
    """A rank's part. Copies of which the receipt or the size is wrong are left out, and told of when none is left."""
    problems: list[str] = []
    gone = False
    shard: Shard | None = None
    for copy in parts:
        if rank not in copy.ranks:
            continue
        path = copy.path / receipt_name(rank, copy.world)
        try:
            receipt = _receipt(copy, path, rank)
        except FileNotFoundError as error:
            gone = True
            problems.append(f"{error.filename} is missing")
        except (OSError, CorruptError) as error:
            problems.append(str(error))
        else:
            if shard is None:
                shard = Shard(rank, receipt, [], look)
            shard.copies.append((copy.place, path))
    if shard is None:
        raise (_Gone if gone else CorruptError)(f"step {key[0]} is not whole: {'; '.join(problems)}")
    for problem in problems:
        log.warning("step %d: a copy of rank %d's shard is out: %s", key[0], rank, problem)
    return shard


def _receipt(copy: Copy, path: Path, rank: int) -> Receipt:
    receipt = Receipt.decode(path.read_bytes(), path)
    if receipt.stamp.key != copy.key or receipt.stamp.rank != rank:
        raise CorruptError(f"{path}: belongs to another checkpoint")
    size = path.with_suffix(".safetensors").stat().st_size
    if size != receipt.file_bytes:
        raise CorruptError(
            f"{path.with_suffix('.safetensors')}: has {size:,} bytes, should have {receipt.file_bytes:,}"
        )
    if copy.place == STORAGE and rank == 0:
        problems = check_manifest(copy.path)
        if problems and not (copy.path / MANIFEST).exists():
            raise FileNotFoundError(errno.ENOENT, "has been renamed or removed", str(copy.path))
        for problem in problems:
            raise problem
    return receipt


# -- describing ------------------------------------------------------------------------------------------------------


class Checkpoint:
    """A whole checkpoint and all that its receipts say. Raises CorruptError when a part of a tensor is missing."""

    def __init__(self, root: Path, key: Key, shards: list[Shard]) -> None:
        self.root, self.key, self.shards = root, key, shards
        self._boxes: dict[str, list[Stored]] = {}
        """By name of the tensor, in the order of DCP's chunks."""
        self._values: dict[str, dict[int, Any]] = {}
        """By name: ranks that have a value, and its encoding."""
        self._names: dict[str, str] = {}
        """By the name that the state has for a tensor: the one that it is stored by. Tied tensors are stored once."""
        self._ways: dict[str, Way] = {}
        self._gather_boxes()
        self._check_coverage()
        for shard in shards:
            for way, node in _leaves(shard.receipt.structure):
                self._leaf(".".join(map(str, way)), way, node, shard)

    def _gather_boxes(self) -> None:
        known: dict[tuple[str, Box], Stored] = {}
        for shard in self.shards:
            for number, chunk in enumerate(shard.receipt.layout.chunks):
                boxes = self._boxes.setdefault(chunk.name, [])
                if boxes and (chunk.dtype, chunk.global_shape) != (boxes[0].chunk.dtype, boxes[0].chunk.global_shape):
                    if chunk.own:
                        continue  # DCP can speak of one tensor only: that of the first rank
                    raise CorruptError(f"step {self.key[0]}: ranks disagree on dtype or shape of tensor {chunk.name!r}")
                stored = known.get((chunk.name, _box(chunk)))
                if stored is None:
                    stored = known[chunk.name, _box(chunk)] = Stored(chunk)
                    boxes.append(stored)
                stored.places[shard.rank] = number

    def _check_coverage(self) -> None:
        wants = [Want(name, _whole(boxes[0].chunk)) for name, boxes in self._boxes.items()]
        haves = [Have(name, _box(stored.chunk)) for name, boxes in self._boxes.items() for stored in boxes]
        for lack in plan(wants, haves).missing:
            raise CorruptError(f"step {self.key[0]}: no shard has {lack.box} of tensor {lack.name!r}")

    def _leaf(self, name: str, way: Way, node: Any, shard: Shard) -> None:
        if isinstance(node, dict) and "$tensor" in node:
            if node["$tensor"] not in self._boxes:
                raise CorruptError(f"step {self.key[0]}: no shard has tensor {node['$tensor']!r}")
            self._names[name] = node["$tensor"]
        else:
            self._values.setdefault(name, {})[shard.rank] = node
        self._ways[name] = way

    def metadata(self) -> Metadata:
        """What DCP's planners need to know. ``planner_data`` says how the state was nested."""
        described: dict[str, TensorStorageMetadata | BytesStorageMetadata]
        described = {name: BytesStorageMetadata() for name in self._values}
        for name, stored_by in self._names.items():
            boxes = self._boxes[stored_by]
            described[name] = TensorStorageMetadata(
                TensorProperties(dtype=getattr(torch, boxes[0].chunk.dtype)),
                torch.Size(boxes[0].chunk.global_shape),
                [
                    ChunkStorageMetadata(torch.Size(stored.chunk.offsets), torch.Size(stored.chunk.sizes))
                    for stored in boxes
                ],
            )
        return Metadata(described, planner_data=dict(self._ways))

    def stored(self, index: MetadataIndex) -> Stored:
        """The box that DCP speaks of. Raises NotFoundError when there is none."""
        boxes = self._boxes[self._names[index.fqn]]
        if index.index is not None and index.index < len(boxes):
            hinted = boxes[index.index]
            if index.offset is None or tuple(index.offset) == hinted.chunk.offsets:
                return hinted
        for stored in boxes:
            if index.offset is None or tuple(index.offset) == stored.chunk.offsets:
                return stored
        raise NotFoundError(f"step {self.key[0]}: tensor {index.fqn!r} has no part that begins at {index.offset}")

    def value(self, name: str, rank: int) -> io.BytesIO:
        """A value as DCP has pickled it; one that Rekindle itself has saved is pickled now. That of ``rank`` if it has
        one."""
        by_rank = self._values[name]
        holder = rank if rank in by_rank else min(by_rank)
        node, values = by_rank[holder], self.shards[holder].receipt.values
        raw = values[node["$value"]] if isinstance(node, dict) and "$value" in node else None
        if isinstance(raw, dict) and "$bytes" in raw:
            return io.BytesIO(decode(raw))
        pickled = io.BytesIO()
        torch.save(assemble(node, values, _no_tensor, allow_pickle=False), pickled)
        pickled.seek(0)
        return pickled


def _box(chunk: Chunk) -> Box:
    return Box(chunk.offsets, chunk.sizes)


def _whole(chunk: Chunk) -> Box:
    return Box((0,) * len(chunk.global_shape), chunk.global_shape)


def _no_tensor(name: str) -> torch.Tensor:
    raise FormatError(f"tensor {name!r} stands where DCP looks for a value")


def _leaves(node: Any, way: Way = ()) -> Iterator[tuple[Way, Any]]:
    """What DCP's planners take for one item each, and where it stands. A list without tensors or mappings is one."""
    if isinstance(node, list) and _is_nest(node):
        for index, item in enumerate(node):
            yield from _leaves(item, (*way, index))
    elif _is_mapping(node):
        for key, child in entries(node).items():
            yield from _leaves(child, (*way, key if type(key) is int else str(key)))
    else:
        yield way, node


def _is_mapping(node: Any) -> bool:
    """A tuple, a tensor and a value are dictionaries too, in JSON."""
    return isinstance(node, dict) and (not node or not next(iter(node)).startswith("$") or bool(entries(node)))


def _is_nest(node: list[Any]) -> bool:
    return any(_is_nest(item) if isinstance(item, list) else _is_mapping(item) or "$tensor" in item for item in node)
