"""A rank's small state: values, generators, buffers, of the newest two steps. It outlives the rank.

What a step's parameters and optimizer state can be had for elsewhere, from replicas, the small state can't: it is
written at every step, whether that step has a snapshot or not. ``rank-NNNNN.small-0`` and ``-1`` are replaced in turn;
``-u`` is how it was before the update that makes its step, where that is asked for. ``rank-NNNNN.plan``, a receipt's
unchanging part, says what their bytes are, and is replaced when the layout is.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rekindle.errors import FormatError
from rekindle.format.fields import check_integers, check_structure, check_values
from rekindle.format.layout import BLOCK, Layout
from rekindle.format.lineage import ShardId
from rekindle.format.names import MAX_RANKS
from rekindle.format.receipt import Receipt, checksum, encode_document, parse_document, read_file
from rekindle.memory.job_dir import JobDir

__all__ = [
    "LocalState",
    "LocalStatePlan",
    "LocalStateWriter",
    "padded",
    "read_before_update",
    "read_local_state_plan",
    "read_local_states",
]

_LENGTH = struct.Struct("<Q")
_SMALL, _PLAN = "rekindle-small", "rekindle-plan"


def padded(nbytes: int) -> int:
    """Bytes that a block of ``nbytes`` takes in a small state."""
    return -(-nbytes // 16) * 16


@dataclass(frozen=True)
class LocalStatePlan:
    """What small states are parts of."""

    layout: Layout
    """Of all that the rank holds."""
    structure: Any
    static: bytes
    """Layout and structure as they were written."""
    blocks: list[int]
    """Numbers of the blocks that small states hold, in the order in which they do."""
    replicas: dict[str, list[int]]
    """By tensor: the ranks that hold the same bytes after each update, this one included."""
    digest: str
    nbytes: int
    """Of the tensors in a small state."""

    def fits(self, half: LocalState) -> bool:
        """Whether ``half`` is a part of this."""
        return half.plan == self.digest and len(half.tensors) == self.nbytes


@dataclass(frozen=True)
class LocalState:
    """The small state of one step."""

    stamp: ShardId
    plan: str
    """Digest of its plan."""
    values: bytes
    """A JSON array, as in a receipt."""
    tensors: memoryview
    """The blocks that the plan names, in its order, each beginning at a multiple of 16 bytes."""


class LocalStateWriter:
    """The writer's side, for one thread at a time. Methods raise OSError when memory is full, or gone."""

    def __init__(self, job: JobDir, rank: int, before_update: bool = False) -> None:
        self._paths = [job.paths.local_state(rank, which) for which in ("u" if before_update else "01")]
        self._plan_path = job.paths.local_state_plan(rank)
        self._plan = ""
        self._next = 0

    def plan(self, stamp: ShardId, static: bytes, blocks: Sequence[int], replicas: Mapping[str, Sequence[int]]) -> None:
        """What is written from now on belongs to this plan. What there was belongs to another one."""
        fields = json.dumps({"blocks": list(blocks), "replicas": replicas}, separators=(",", ":")).encode()[1:-1]
        text = encode_document(replace(stamp, step=0), _PLAN, fields + b"," + static)  # alike whenever it is written
        self._plan = checksum(text)
        for path in self._paths:
            path.unlink(missing_ok=True)
        _replace(self._plan_path, [text])

    def write(self, stamp: ShardId, values: bytes, tensors: memoryview) -> None:
        """Replace the older of the two."""
        head = f'"plan":"{self._plan}","tensors":"{checksum(tensors)}","values":'.encode()
        text = encode_document(stamp, _SMALL, head + values)
        _replace(self._paths[self._next], [_LENGTH.pack(len(text)), text, tensors])
        self._next = (self._next + 1) % len(self._paths)


def read_local_state_plan(job: JobDir, rank: int) -> LocalStatePlan | None:
    """The plan of a rank's small states; None when there is none. Raises FormatError when it is damaged."""
    path = job.paths.local_state_plan(rank)
    try:
        raw = read_file(path)
    except FileNotFoundError:
        return None
    fields = parse_document(raw, _PLAN, path)
    try:
        return _plan(fields, checksum(raw), path)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise FormatError(f"{path}: is no plan: {error}") from error


def _plan(fields: dict[str, Any], digest: str, path: Path) -> LocalStatePlan:
    layout = Receipt.decode_layout(fields, path)
    kept = {name: fields[name] for name in ("checksum", "shard", "structure", "tensors")}
    static = json.dumps(kept, separators=(",", ":")).encode()[1:-1]
    check_structure(fields["structure"])
    replicas = {
        name: list(check_integers(ranks, MAX_RANKS, MAX_RANKS - 1)) for name, ranks in fields["replicas"].items()
    }
    if len({(chunk.name, chunk.offsets) for chunk in layout.chunks}) != len(layout.chunks):
        raise ValueError("a tensor is there twice")
    sizes, block = {}, 0
    for chunk in layout.chunks:
        sizes[block] = chunk.nbytes  # of a larger one, no small state has a part
        block += -(-chunk.nbytes // BLOCK)
    known = list(check_integers(fields["blocks"], block, block - 1))
    if len(set(known)) != len(known) or not all(0 < sizes.get(number, 0) <= BLOCK for number in known):
        raise ValueError("its blocks are no small tensors")
    nbytes = sum(padded(sizes[number]) for number in known)
    return LocalStatePlan(layout, fields["structure"], static, known, replicas, digest, nbytes)


def read_local_states(job: JobDir, rank: int) -> list[LocalState]:
    """A rank's small states, newest first. Damaged ones are left out."""
    found = []
    for which in "01":
        with suppress(OSError, FormatError):
            found.append(_read(job.paths.local_state(rank, which), rank))
    return sorted(found, key=lambda half: (half.stamp.incarnation, half.stamp.step), reverse=True)


def read_before_update(job: JobDir, rank: int) -> LocalState | None:
    """How a rank's small state was before its newest update; its stamp is that of the step which that update makes."""
    with suppress(OSError, FormatError):
        return _read(job.paths.local_state(rank, "u"), rank)
    return None


def _read(path: Path, rank: int) -> LocalState:
    raw = memoryview(read_file(path))
    try:
        (length,) = _LENGTH.unpack_from(raw)
        text, tensors = bytes(raw[_LENGTH.size : _LENGTH.size + length]), raw[_LENGTH.size + length :]
        fields: dict[str, Any] = parse_document(text, _SMALL, path)
        if checksum(tensors) != fields["tensors"]:
            raise FormatError(f"{path}: damaged, its bytes differ from their digest")
        values = json.dumps(check_values(fields["values"]), separators=(",", ":"), allow_nan=False).encode()
        stamp = ShardId.from_json(fields["stamp"])
        if stamp.rank != rank:
            raise FormatError(f"{path}: is that of rank {stamp.rank}")
        return LocalState(stamp, str(fields["plan"]), values, tensors)
    except (KeyError, ValueError, struct.error) as error:
        raise error if isinstance(error, FormatError) else FormatError(f"{path}: is no small state: {error}") from error


def _replace(path: Path, parts: Sequence[bytes | memoryview]) -> None:
    temporary = path.with_name(f".{path.name}.tmp")
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        for part in parts:
            view = memoryview(part)
            while view:
                view = view[os.write(fd, view) :]
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    finally:
        os.close(fd)
    os.replace(temporary, path)
