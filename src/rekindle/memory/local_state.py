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
from typing import Any, NamedTuple

from rekindle.errors import FormatError
from rekindle.format.fields import check_integers, check_structure, check_values
from rekindle.format.layout import BLOCK, Layout
from rekindle.format.lineage import ShardId
from rekindle.format.names import MAX_RANKS
from rekindle.format.receipt import Receipt, checksum, encode_document, parse_document, read_file
from rekindle.memory.job_dir import JobDir
from rekindle.memory.paths import JobPaths, remove_any

__all__ = [
    "LocalFiles",
    "LocalState",
    "LocalStatePlan",
    "LocalStateWriter",
    "decode_local_state",
    "decode_local_state_plan",
    "local_state_paths",
    "padded",
    "read_local_bytes",
    "read_local_files",
    "replace_file",
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

    @property
    def made(self) -> bool:
        """True if training has made it. The one with which a start begins has no snapshot to go with it."""
        return self.stamp.step > self.stamp.incarnation.parent_step


class LocalFiles(NamedTuple):
    """All that the files of a rank tell of its local states."""

    plan: LocalStatePlan
    states: list[LocalState]
    """Those of the plan, newest first."""
    before: LocalState | None
    """The one before the newest update, if it is of the plan. Its stamp is that of the step which the update makes."""

    @property
    def newest(self) -> tuple[int, int] | None:
        """Generation and step of the newest local state that training has made; None if there is none."""
        made = [state.stamp for state in self.states if state.made]
        return (made[0].incarnation.generation, made[0].step) if made else None

    @staticmethod
    def decode(files: Mapping[str, bytes], rank: int, where: object) -> LocalFiles | None:
        """Returns the content of ``files``, as ``read_local_bytes`` returns them; None if there is no plan among them.

        Raises FormatError, which names ``where``, when the plan is damaged. Damaged local states are left out.
        """
        if "plan" not in files:
            return None
        plan, found = decode_local_state_plan(files["plan"], f"{where}: plan of rank {rank}"), dict[str, LocalState]()
        for which in files.keys() - {"plan"}:
            with suppress(FormatError):
                state = decode_local_state(files[which], rank, f"{where}: local state {which} of rank {rank}")
                if plan.fits(state):
                    found[which] = state
        before = found.pop("u", None)
        states = sorted(found.values(), key=lambda s: (s.stamp.incarnation, s.stamp.step), reverse=True)
        return LocalFiles(plan, states, before)


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
        for path in (*self._paths, self._plan_path):
            remove_any(path)
        replace_file(self._plan_path, [text])

    def write(self, stamp: ShardId, values: bytes, tensors: memoryview) -> None:
        """Replaces the older of the two local states."""
        head = f'"plan":"{self._plan}","tensors":"{checksum(tensors)}","values":'.encode()
        text = encode_document(stamp, _STATE, head + values)
        replace_file(self._paths[self._next], [_LENGTH.pack(len(text)), text, tensors])
        self._next = (self._next + 1) % len(self._paths)


def local_state_paths(paths: JobPaths, rank: int) -> dict[str, Path]:
    """Returns the files of a rank's local states, by the part of the name that tells them apart."""
    return {"plan": paths.local_state_plan(rank), **{which: paths.local_state(rank, which) for which in "01u"}}


def read_local_bytes(paths: JobPaths, rank: int) -> dict[str, bytes]:
    """Returns the bytes of those of a rank's files that are there. Raises FormatError for a plan that is no file."""
    found = {}
    for which, path in local_state_paths(paths, rank).items():
        try:
            found[which] = read_file(path)
        except OSError:
            continue
        except FormatError:
            if which == "plan":
                raise
    return found


def read_local_files(paths: JobPaths, rank: int) -> LocalFiles | None:
    """Returns the content of a rank's files; None if it has no plan. Raises FormatError when that is damaged."""
    return LocalFiles.decode(read_local_bytes(paths, rank), rank, paths.directory)


def decode_local_state_plan(raw: bytes, where: str) -> LocalStatePlan:
    """Returns the plan in the bytes of its file. Raises FormatError, which names ``where``."""
    fields = parse_document(raw, _PLAN, where)
    try:
        return _plan(fields, checksum(raw), where)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise FormatError(f"{where}: is not the plan of a local state: {error}") from error


def _plan(fields: dict[str, Any], digest: str, where: str) -> LocalStatePlan:
    layout = Receipt.decode_layout(fields, where)
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


def decode_local_state(data: bytes, rank: int, where: str) -> LocalState:
    """Returns the local state of ``rank`` in the bytes of its file. Raises FormatError, which names ``where``."""
    raw = memoryview(data)
    try:
        (length,) = _LENGTH.unpack_from(raw)
        text, tensors = bytes(raw[_LENGTH.size : _LENGTH.size + length]), raw[_LENGTH.size + length :]
        fields: dict[str, Any] = parse_document(text, _STATE, where)
        if checksum(tensors) != fields["tensors"]:
            raise FormatError(f"{where}: is damaged: its bytes differ from their digest")
        values = json.dumps(check_values(fields["values"]), separators=(",", ":"), allow_nan=False).encode()
        stamp = ShardId.from_json(fields["stamp"])
        if stamp.rank != rank:
            raise FormatError(f"{where}: belongs to rank {stamp.rank}, not to rank {rank}")
        return LocalState(stamp, str(fields["plan"]), values, tensors)
    except (KeyError, ValueError, struct.error) as error:
        if isinstance(error, FormatError):
            raise
        raise FormatError(f"{where}: is not a local state: {error}") from error


def replace_file(path: Path, parts: Sequence[bytes | memoryview]) -> None:
    """Replaces ``path`` by a file of ``parts``, which only this user can read. Raises OSError."""
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
