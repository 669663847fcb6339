"""Finds a whole checkpoint in memory or on storage, and describes it by DCP's ``Metadata``."""

from __future__ import annotations

import errno
import io
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
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
from rekindle.format.boxes import Box
from rekindle.format.completeness import find_defect
from rekindle.format.files import Files
from rekindle.format.layout import Chunk
from rekindle.format.lineage import CheckpointKey, drop_superseded
from rekindle.format.names import MANIFEST, Root, receipt_name, shard_name
from rekindle.format.receipt import Receipt
from rekindle.integrations.dcp.agree import on_purpose
from rekindle.integrations.dcp.items import LeafPath
from rekindle.memory.job_dir import JobDir
from rekindle.session.inventory import Inventory, only_in_deleted_run, refuse_less, refuse_two_runs, take_inventory
from rekindle.state.codec import decode
from rekindle.state.tree import assemble, entries
from rekindle.storage.catalog import MEMORY, STORAGE, StoredCopy
from rekindle.storage.open import open_store
from rekindle.storage.verify import check_manifest

__all__ = ["DcpCheckpoint", "Shard", "StoredBox", "find"]

log = logging.getLogger("rekindle")


_Look = Callable[[], Inventory]
_LOOKS = 3
"""Times that a checkpoint is looked for while files come and go."""


@dataclass
class Shard:
    """One rank's shard, and the copies of it that seem whole, the nearest first: store and files of each."""

    rank: int
    receipt: Receipt
    copies: list[tuple[str, Files]]
    look: _Look
    """Lists all copies of all checkpoints anew."""

    def places(self) -> Iterator[tuple[str, Files]]:
        """Iterates over the copies, and then over those that came, or got another name, since they were listed."""
        yield from self.copies
        for copy in self.look().all_copies:
            here = copy.place, copy.files
            if copy.checkpoint == self.receipt.stamp.checkpoint and self.rank in copy.ranks and here not in self.copies:
                yield here


@dataclass
class StoredBox:
    """A box of a tensor, and the ranks that have it: several, where Rekindle itself has saved replicas."""

    chunk: Chunk
    places: dict[int, int] = field(default_factory=dict)
    """By rank: number of the chunk in the rank's shard."""


# -- finding ---------------------------------------------------------------------------------------------------------


def find(root: Root, job: JobDir, step: int | None, *, own: bool = False) -> DcpCheckpoint:
    """Finds the newest whole checkpoint that this process can see, or that of ``step``. Reads no tensor.

    ``own``: this process saves there itself, so that memory holds what is newer than anything that was deleted.

    Raises NotFoundError when there is none, or storage shows less than it had, CorruptError when a part of it is
    missing or damaged.
    """
    job.check()
    look = partial(_look, root, job)
    for _ in range(_LOOKS):
        try:
            return _find(root, look, step, own=own)
        except _Gone as error:
            missing = error
    raise CorruptError(str(missing))


class _Gone(CorruptError):
    """A file is missing: perhaps it has only been renamed, or its memory used again, since it was listed."""


def _find(root: Root, look: _Look, step: int | None, *, own: bool) -> DcpCheckpoint:
    found: dict[CheckpointKey, list[StoredCopy]] = {}
    inventory = look()
    if step is None and not own:
        _refuse_deleted(inventory)
    for copy in drop_superseded(_of_the_run(inventory, step, own=own)):
        found.setdefault(copy.checkpoint, []).append(copy)
    whole = {key: parts for key, parts in found.items() if not _lacking(parts)}
    chosen = max((key for key in whole if step in (None, key.step)), default=None)
    if chosen is None:
        raise NotFoundError(_why_none(root, found, step))
    if step is None:
        refuse_less(chosen.step, [inventory], on_purpose(chosen.step))
    parts = found[chosen]
    try:
        shards = [_shard(chosen, parts, rank, look) for rank in range(parts[0].world)]
        return DcpCheckpoint(root, chosen, shards)
    except CorruptError as error:
        others = sorted({key[0] for key in whole} - {chosen[0]}, reverse=True)
        if step is not None or not others:
            raise
        raise type(error)(
            f"{error}; there are older checkpoints, to be asked for by checkpoint_id: {others}"
        ) from error


def _look(root: Root, job: JobDir) -> Inventory:
    """Lists all copies of all checkpoints. Raises NotFoundError where memory has none, and storage can't be listed."""
    inventory = take_inventory(job, open_store(root), 0)
    if inventory.storage_error is not None:
        why = f"storage can't be listed: {inventory.storage_error}"
        if not inventory.copies:
            raise NotFoundError(f"nothing to load in memory, and {why}")
        log.warning("only what is in memory can be loaded: %s", why)
    return inventory


def _refuse_deleted(inventory: Inventory) -> None:
    """Raises NotFoundError if all that storage had was deleted: what memory still has of it is not the newest one."""
    if inventory.deleted:
        steps = sorted({copy.step for copy in inventory.all_copies})
        rest = f"; memory still has steps {steps}, to be loaded by checkpoint_id" if steps else ""
        raise NotFoundError(f"the checkpoints in {inventory.root} were deleted{rest}")


def _of_the_run(inventory: Inventory, step: int | None, *, own: bool) -> list[StoredCopy]:
    """Lists all copies; those alone of a run that was deleted and is back, if ``step`` is of it.

    Raises NotFoundError where another run has begun since, and no step is asked for.
    """
    copies, fresh_start = inventory.all_copies, inventory.fresh_start
    if fresh_start is None or own:
        return copies
    if step is None:
        refuse_two_runs(inventory.offers, fresh_start, on_purpose)
        return copies
    if not only_in_deleted_run(step, copies, fresh_start):
        return copies
    return [copy for copy in copies if copy.incarnation.generation < fresh_start[0]]


def _lacking(parts: list[StoredCopy]) -> list[int]:
    return sorted(set(range(parts[0].world)).difference(*(copy.ranks for copy in parts)))


def _why_none(root: Root, found: dict[CheckpointKey, list[StoredCopy]], step: int | None) -> str:
    parts = next((parts for key, parts in found.items() if key[0] == step), None)
    if parts is not None:
        return (
            f"{root}: step {step} is not whole, the shards of ranks {_lacking(parts)} of {parts[0].world} are missing"
        )
    known = sorted({key[0] for key, parts in found.items() if not _lacking(parts)})
    return (
        f"{root}: no checkpoint" + ("" if step is None else f" of step {step}") + (f"; there are {known}" * bool(known))
    )


def _shard(key: CheckpointKey, parts: list[StoredCopy], rank: int, look: _Look) -> Shard:
    """Opens a rank's shard. Skips copies whose receipt or size is wrong, and names them when none is left."""
    problems: list[str] = []
    gone = False
    shard: Shard | None = None
    for copy in parts:
        if rank not in copy.ranks:
            continue
        try:
            receipt = _receipt(copy, rank, shard.receipt if shard is not None else None)
        except FileNotFoundError as error:
            gone = True
            problems.append(f"{error.filename} is missing")
        except (OSError, CorruptError) as error:
            problems.append(str(error))
        else:
            if shard is None:
                shard = Shard(rank, receipt, [], look)
            shard.copies.append((copy.place, copy.files))
    if shard is None:
        raise (_Gone if gone else CorruptError)(f"step {key[0]} is not whole: {'; '.join(problems)}")
    for problem in problems:
        log.warning("step %d: a copy of rank %d's shard was skipped: %s", key[0], rank, problem)
    return shard


def _receipt(copy: StoredCopy, rank: int, known: Receipt | None) -> Receipt:
    """Returns a copy's receipt: the one that is ``known`` from another copy, if it is the same."""
    name = receipt_name(rank, copy.world)
    raw = copy.files.read(name)
    receipt = known if known is not None and known.raw == raw else Receipt.decode(raw, copy.files.named(name))
    if receipt.stamp.checkpoint != copy.checkpoint or receipt.stamp.rank != rank:
        raise CorruptError(f"{copy.files.named(name)}: belongs to another checkpoint")
    where = copy.files.named(shard_name(rank, copy.world))
    receipt.check_size(copy.files.shard_size(rank, copy.world), where, in_memory=copy.place == MEMORY)
    if copy.place == STORAGE and rank == 0:
        problems = check_manifest(copy.files)
        if problems and not copy.files.exists(MANIFEST):
            raise FileNotFoundError(errno.ENOENT, "has been renamed or removed", str(copy.files))
        for problem in problems:
            raise problem
    return receipt


# -- describing ------------------------------------------------------------------------------------------------------


class DcpCheckpoint:
    """A whole checkpoint, as its receipts describe it. Raises CorruptError when a part of a tensor is missing."""

    def __init__(self, root: Root, key: CheckpointKey, shards: list[Shard]) -> None:
        self.root, self.key, self.shards = root, key, shards
        self._boxes: dict[str, list[StoredBox]] = {}
        """By name of the tensor, in the order of DCP's chunks."""
        self._values: dict[str, dict[int, Any]] = {}
        """By name: the ranks that have a value, and its encoding."""
        self._names: dict[str, str] = {}
        """By the state's name of a tensor: the name that it is stored by. Tied tensors are stored once."""
        self._ways: dict[str, LeafPath] = {}
        problem = find_defect(shard.receipt for shard in shards)
        if problem:
            raise CorruptError(f"step {key[0]}: {problem}")
        self._gather_boxes()
        for shard in shards:
            for way, node in _leaves(shard.receipt.structure):
                self._leaf(".".join(map(str, way)), way, node, shard)

    def _gather_boxes(self) -> None:
        known: dict[tuple[str, Box], StoredBox] = {}
        for shard in self.shards:
            for number, chunk in enumerate(shard.receipt.layout.chunks):
                boxes = self._boxes.setdefault(chunk.name, [])
                if boxes and (chunk.dtype, chunk.global_shape) != (boxes[0].chunk.dtype, boxes[0].chunk.global_shape):
                    continue  # each has its own; DCP can speak of one tensor only: that of the first rank
                stored = known.get((chunk.name, chunk.box))
                if stored is None:
                    stored = known[chunk.name, chunk.box] = StoredBox(chunk)
                    boxes.append(stored)
                stored.places[shard.rank] = number

    def _leaf(self, name: str, way: LeafPath, node: Any, shard: Shard) -> None:
        if isinstance(node, dict) and "$tensor" in node:
            self._names[name] = node["$tensor"]
        else:
            self._values.setdefault(name, {})[shard.rank] = node
        self._ways[name] = way

    def metadata(self) -> Metadata:
        """Describes the checkpoint to DCP's planners. ``planner_data`` says how the state was nested."""
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

    def stored(self, index: MetadataIndex) -> StoredBox:
        """Returns the box that DCP asks for. Raises NotFoundError when there is none."""
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
        """Returns a value as DCP pickled it, of ``rank`` if that has one.

        A value that Rekindle itself has saved is pickled now.
        """
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


def _no_tensor(name: str) -> torch.Tensor:
    raise FormatError(f"tensor {name!r} stands where DCP looks for a value")


def _leaves(node: Any, way: LeafPath = ()) -> Iterator[tuple[LeafPath, Any]]:
    """Iterates over what DCP's planners take for one item each, and its place.

    A list without tensors or mappings is one item.
    """
    if isinstance(node, list) and _is_nest(node):
        for index, item in enumerate(node):
            yield from _leaves(item, (*way, index))
    elif _is_mapping(node):
        for key, child in entries(node).items():
            yield from _leaves(child, (*way, key if type(key) is int else str(key)))
    else:
        yield way, node


def _is_mapping(node: Any) -> bool:
    """Returns True for a mapping. A tuple, a tensor and a value are dictionaries too, in JSON."""
    return isinstance(node, dict) and (not node or not next(iter(node)).startswith("$") or bool(entries(node)))


def _is_nest(node: list[Any]) -> bool:
    return any(_is_nest(item) if isinstance(item, list) else _is_mapping(item) or "$tensor" in item for item in node)
