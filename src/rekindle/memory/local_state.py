"""Stores a rank's local state of its newest two steps, so that it outlives the rank.

The local state is what only this rank has: values, generators, buffers. Parameters and optimizer state may have
replicas on other ranks, the local state has none. So it is written at every step, whether the step has a snapshot or
not. ``rank-NNNNN.small-0`` and ``-1`` are replaced in turn; ``-u``, if asked for, is the local state before the update
that makes its step. ``rank-NNNNN.plan``, the part of a receipt that doesn't change, describes their bytes. It is
replaced when the layout changes.
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
_STATE, _PLAN = "rekindle-small", "rekindle-plan"


def padded(nbytes: int) -> int:
    """Returns the bytes that a block of ``nbytes`` takes in a local state."""
    return -(-nbytes // 16) * 16


@dataclass(frozen=True)
class LocalStatePlan:
    """Describes the bytes of a rank's local states."""

    layout: Layout
    """Layout of all tensors that the rank holds."""
    structure: Any
    """Structure of the rank's whole state."""
    static: bytes
    """Layout and structure as encoded by ``Receipt.static_part``."""
    blocks: list[int]
    """Numbers of the blocks that a local state holds, in its order."""
    replicas: dict[str, list[int]]
    """Maps the name of a tensor to the ranks that hold the same bytes after each update, this one included."""
    digest: str
    """Checksum of the plan's file, to which local states refer."""
    nbytes: int
    """Bytes of the tensors in a local state, padding included."""

    def fits(self, state: LocalState) -> bool:
        """True if ``state`` was written by this plan."""
        return state.plan == self.digest and len(state.tensors) == self.nbytes


@dataclass(frozen=True)
class LocalState:
    """Holds the local state of one step."""

    stamp: ShardId
    plan: str
    """Digest of the plan that describes it."""
    values: bytes
    """Values as a JSON array, as in a receipt."""
    tensors: memoryview
    """Bytes of the plan's blocks, in its order, each at a multiple of 16 bytes."""


class LocalStateWriter:
    """Writes a rank's local states. For one thread at a time. Methods raise OSError when memory is full, or gone."""

    def __init__(self, job: JobDir, rank: int, *, before_update: bool = False) -> None:
        self._paths = [job.paths.local_state(rank, which) for which in ("u" if before_update else "01")]
        self._plan_path = job.paths.local_state_plan(rank)
        self._plan = ""
        self._next = 0

    def set_plan(
        self, stamp: ShardId, static: bytes, blocks: Sequence[int], replicas: Mapping[str, Sequence[int]]
    ) -> None:
        """Writes the plan of all local states to come, and removes those of the plan before."""
        fields = json.dumps({"blocks": list(blocks), "replicas": replicas}, separators=(",", ":")).encode()[1:-1]
        text = encode_document(replace(stamp, step=0), _PLAN, fields + b"," + static)  # the same digest at every step
        self._plan = checksum(text)
        for path in self._paths:
            path.unlink(missing_ok=True)
        _replace(self._plan_path, [text])

    def write(self, stamp: ShardId, values: bytes, tensors: memoryview) -> None:
        """Replaces the older of the two local states."""
        head = f'"plan":"{self._plan}","tensors":"{checksum(tensors)}","values":'.encode()
        text = encode_document(stamp, _STATE, head + values)
        _replace(self._paths[self._next], [_LENGTH.pack(len(text)), text, tensors])
        self._next = (self._next + 1) % len(self._paths)


def read_local_state_plan(job: JobDir, rank: int) -> LocalStatePlan | None:
    """Returns the plan of a rank's local states; None if there is none. Raises FormatError when it is damaged."""
    path = job.paths.local_state_plan(rank)
    try:
        raw = read_file(path)
    except FileNotFoundError:
        return None
    fields = parse_document(raw, _PLAN, path)
    try:
        return _plan(fields, checksum(raw), path)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise FormatError(f"{path}: is not the plan of a local state: {error}") from error


def _plan(fields: dict[str, Any], digest: str, path: Path) -> LocalStatePlan:
    layout = Receipt.decode_layout(fields, path)
    kept = {name: fields[name] for name in ("checksum", "shard", "structure", "tensors")}
    static = json.dumps(kept, separators=(",", ":")).encode()[1:-1]
    check_structure(fields["structure"])
    replicas = {
        name: list(check_integers(ranks, MAX_RANKS, MAX_RANKS - 1)) for name, ranks in fields["replicas"].items()
    }
    if len({(chunk.name, chunk.offsets) for chunk in layout.chunks}) != len(layout.chunks):
        raise ValueError("it has a tensor twice")
    sizes, block = {}, 0
    for chunk in layout.chunks:
        sizes[block] = chunk.nbytes  # a tensor of several blocks is in no local state
        block += -(-chunk.nbytes // BLOCK)
    known = list(check_integers(fields["blocks"], block, block - 1))
    if len(set(known)) != len(known) or not all(0 < sizes.get(number, 0) <= BLOCK for number in known):
        raise ValueError("its blocks are not those of whole tensors")
    nbytes = sum(padded(sizes[number]) for number in known)
    return LocalStatePlan(layout, fields["structure"], static, known, replicas, digest, nbytes)


def read_local_states(job: JobDir, rank: int) -> list[LocalState]:
    """Returns a rank's local states, newest first, without damaged ones."""
    found = []
    for which in "01":
        with suppress(OSError, FormatError):
            found.append(_read(job.paths.local_state(rank, which), rank))
    return sorted(found, key=lambda state: (state.stamp.incarnation, state.stamp.step), reverse=True)


def read_before_update(job: JobDir, rank: int) -> LocalState | None:
    """Returns a rank's local state before its newest update; None if there is none, or it is damaged.

    Its stamp is that of the step which the update makes.
    """
    with suppress(OSError, FormatError):
        return _read(job.paths.local_state(rank, "u"), rank)
    return None


def _read(path: Path, rank: int) -> LocalState:
    raw = memoryview(read_file(path))
    try:
        (length,) = _LENGTH.unpack_from(raw)
        text, tensors = bytes(raw[_LENGTH.size : _LENGTH.size + length]), raw[_LENGTH.size + length :]
        fields: dict[str, Any] = parse_document(text, _STATE, path)
        if checksum(tensors) != fields["tensors"]:
            raise FormatError(f"{path}: is damaged: its bytes differ from their digest")
        values = json.dumps(check_values(fields["values"]), separators=(",", ":"), allow_nan=False).encode()
        stamp = ShardId.from_json(fields["stamp"])
        if stamp.rank != rank:
            raise FormatError(f"{path}: belongs to rank {stamp.rank}, not to rank {rank}")
        return LocalState(stamp, str(fields["plan"]), values, tensors)
    except (KeyError, ValueError, struct.error) as error:
        if isinstance(error, FormatError):
            raise
        raise FormatError(f"{path}: is not a local state: {error}") from error


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
