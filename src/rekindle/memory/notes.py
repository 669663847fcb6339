"""Keeps the small notes of a job: its newest step on storage, its newest drain, the step that its nodes keep together.

They lie in the job's directory, so that other processes and the next start read them. Each is replaced as a whole, and
ends with its checksum: a wrong step would have snapshots given up that storage lacks, or a start refused.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from rekindle.format.fields import check_seconds, loads
from rekindle.format.lineage import check_id
from rekindle.format.receipt import checksum, read_file, write_atomic
from rekindle.memory.paths import JobPaths

__all__ = [
    "Common",
    "DirectoryIdentity",
    "Marks",
    "Notes",
    "RootIdentity",
    "SafeStep",
    "durable_at",
    "read_note",
    "write_note",
]

_CRAMPED_FOR = 60.0
"""Seconds after which it is tried again if memory has room for a third slot: others may have filled it for a moment."""
_DURABLE = "durable"
_NO_GENERATION = 1 << 62
"""Above every generation that a job can reach."""
_OLD_DURABLE, _OLD_FRESH_START, _OLD_COMMON = 20, 41, 138
"""Bytes of notes that older versions wrote, without checksums. A restart after an update needs them: it must not go on
from less than storage had, nor from a run that was deleted, nor write over what is safe from the loss of a node. Other
notes are of the running start, which writes them again, so they have to have checksums."""

DirectoryIdentity = list[int]
RootIdentity = list[DirectoryIdentity | None]
"""Identities of a root and of the directories above it, see ``rekindle.storage.identity``."""


class Common(NamedTuple):
    """Steps on which the nodes of a start agree. -1 stands for none."""

    start: str
    """Id of the incarnation."""
    step: int
    """Step that every node keeps in memory, and copies from another one, as soon as it has it."""
    safe: int
    """Newest node-safe step: all nodes have it in memory, and copies that replace any one of them."""
    drain: int
    """Newest step that is marked for storage."""
    kept: int = -1
    """The common step while other nodes may count on this one to keep it: no save writes over it."""


class SafeStep(NamedTuple):
    """The newest step that was node-safe, of the present start or of a former one."""

    start: str
    step: int


class Marks(NamedTuple):
    """All that the note on the common step says."""

    common: Common
    safe: SafeStep | None


class Notes:
    """Reads and writes one job's notes. Safe to use from any thread or process.

    A note that is missing or damaged reads as None. Writing raises OSError when the directory is gone.
    """

    def __init__(self, paths: JobPaths) -> None:
        directory = paths.directory
        self._durable, self._root = directory / _DURABLE, directory / "root.json"
        self._drained, self._anew = directory / "drained", directory / "anew"
        self._common, self._wanted = directory / "common", directory / "wanted"
        self._cramped = directory / "cramped"
        self._agent_status = paths.agent_status

    def durable(self) -> int | None:
        """Returns the newest step that is known to be on storage."""
        try:
            return int(read_note(self._durable, _OLD_DURABLE))
        except (OSError, ValueError):
            return None

    def write_durable(self, step: int, identity: RootIdentity | None = None) -> None:
        """Notes the newest step that is on storage, and the identity of the root that showed it.

        Ranks then know which snapshots they may give up. The next start knows the step, should storage be away then.
        """
        self._write_root_identity(identity)
        if self.durable() != step:  # else the note's time stays, see durable_at
            write_note(self._durable, b"%020d" % step)

    def root_identity(self) -> RootIdentity | None:
        """Returns the identity of the root in which the newest durable step was seen."""
        try:
            return [None if entry is None else _four(entry) for entry in loads(read_file(self._root))]
        except (OSError, ValueError, TypeError):
            return None

    def _write_root_identity(self, identity: RootIdentity | None) -> None:
        """Replaces the root's identity. An outdated one could make a missing mount look like a deleted root."""
        if identity is not None and identity == self.root_identity():
            return
        try:
            if identity is not None:
                write_atomic(self._root, json.dumps(identity).encode())
                return
        except OSError:  # memory is full: without the note, a deleted root looks like a missing mount, which is safe
            pass
        self._root.unlink(missing_ok=True)

    def forget_durable(self) -> None:
        """Removes the note on the durable step: a new start may have gone back to before it."""
        self._durable.unlink(missing_ok=True)
        self._root.unlink(missing_ok=True)

    def last_drain(self) -> tuple[float, float] | None:
        """Returns when the newest drain began, by this machine's monotonic clock, and how many seconds it took."""
        try:
            began, seconds = (check_seconds(float(number)) for number in read_note(self._drained).split())
        except (OSError, ValueError):
            return None
        return began, seconds

    def write_last_drain(self, began: float, seconds: float) -> None:
        """Notes when the newest drain began, by the monotonic clock, and how many seconds it took."""
        write_note(self._drained, b"%020.3f %020.3f" % (began, seconds))

    def fresh_start(self) -> tuple[int, int] | None:
        """Returns the generations ``(since, until)`` that ``write_fresh_start`` noted."""
        try:
            since, until = map(int, read_note(self._anew, _OLD_FRESH_START).split())
        except (OSError, ValueError):
            return None
        return since, until

    def write_fresh_start(self, since: int, until: int = _NO_GENERATION) -> None:
        """Notes that the job began anew with generation ``since``, because all checkpoints on storage were deleted.

        From generation ``until`` on it continues from a checkpoint that the user chose, even if the deleted ones are
        back.
        """
        write_note(self._anew, b"%020d %020d" % (since, until))

    def forget_fresh_start(self) -> None:
        """Removes the note on the fresh start: the chosen checkpoint is on storage."""
        self._anew.unlink(missing_ok=True)

    def common(self) -> Common | None:
        """Returns the steps on which the nodes of a start agree: of the newest start that came to agree on any."""
        marks = self.marks()
        return marks.common if marks is not None else None

    def marks(self) -> Marks | None:
        """Returns what ``common`` does, and the newest node-safe step, which may be of a former start."""
        try:
            note = read_note(self._common, _OLD_COMMON).decode()
            start, step, safe, drain, kept, safe_start, safe_step = note.split()
            common = Common(check_id(start), int(step), int(safe), int(drain), int(kept))
            return Marks(common, None if int(safe_step) < 0 else SafeStep(check_id(safe_start), int(safe_step)))
        except (OSError, ValueError):
            return None

    def write_common(self, common: Common) -> None:
        """Notes the steps on which the nodes agree. The node-safe step of a former start stays until there is another.

        For one process: the agent.
        """
        if common.safe >= 0:
            safe: SafeStep | None = SafeStep(common.start, common.safe)
        else:
            marks = self.marks()
            safe = marks.safe if marks is not None else None
        start, step = safe if safe is not None else (common.start, -1)
        write_note(self._common, f"{common.start} {_digits(*common[1:])} {start} {_digits(step)}".encode())

    def wanted(self) -> int | None:
        """Returns the newest step that a save waits for to be node-safe. It may be one of an earlier start."""
        try:
            return int(read_note(self._wanted))
        except (OSError, ValueError):
            return None

    def write_wanted(self, step: int) -> None:
        """Notes a step that a save waits for to be node-safe."""
        write_note(self._wanted, b"%020d" % step)

    def is_cramped(self, start: str) -> bool:
        """Returns True if a rank of this node lately had no room for a save beside the step that all nodes keep."""
        try:
            noted, at = read_note(self._cramped).decode().split()
            return noted == start and 0 <= time.monotonic() - float(at) < _CRAMPED_FOR
        except (OSError, ValueError):
            return False

    def write_cramped(self, start: str) -> None:
        """Notes that a rank had no room for a save beside the step that all nodes of ``start`` keep."""
        write_note(self._cramped, f"{start} {int(time.monotonic()):020d}".encode())

    def write_agent_status(self, status: Mapping[str, Any]) -> None:
        """Replaces the status of the process that drains: the agent, or a trainer in its place."""
        write_atomic(self._agent_status, json.dumps(status).encode())

    def is_brought(self, step: int, start: str) -> bool:
        """True if storage has got this node's shards of a step, or of a later one, of the incarnation ``start``."""
        try:
            brought, its_start = loads(read_file(self._agent_status))["brought"]
            return bool(its_start == start and brought >= step)
        except (OSError, ValueError, KeyError, TypeError):
            return False

    def drain_error(self) -> str:
        """Returns the error or the wait that the status of who drains names; empty when there is none."""
        try:
            status = loads(read_file(self._agent_status))
            return str(status["error"] or status.get("waits") or "")
        except (OSError, ValueError, KeyError, TypeError):
            return ""

    def safe_step(self, start: str) -> int:
        """Returns the newest step of the incarnation ``start`` that survives the loss of any one node; -1 for none."""
        common = self.common()
        return common.safe if common is not None and common.start == start else -1


def durable_at(directory: Path) -> float | None:
    """Returns the time since 1970 since which the newest durable step of a job is known here; None if none is."""
    try:
        return (directory / _DURABLE).stat().st_mtime
    except OSError:
        return None


def write_note(path: Path, text: bytes) -> None:
    """Replaces a note, also where memory is full. ``text`` has the same length each time."""
    note = text + b" " + checksum(text).encode()
    try:
        write_atomic(path, note)
    except OSError:  # full memory has no page for another file, and needs none to write over this one
        with open(path, "r+b", buffering=0) as file:
            file.write(note)


def read_note(path: Path, unsealed: int | None = None) -> bytes:
    """Returns the text of a note. Raises OSError, and ValueError where its checksum says that it is damaged.

    A note of ``unsealed`` bytes is an older version's, which has no checksum, and reads as it stands.
    """
    note = read_file(path)
    if len(note) == unsealed:
        return note
    text, _, digest = note.rpartition(b" ")
    if checksum(text).encode() != digest:
        raise ValueError(f"{path}: is damaged: its bytes differ from its checksum")
    return text


def _digits(*numbers: int) -> str:
    return " ".join(f"{number:020d}" for number in numbers)


def _four(value: Any) -> DirectoryIdentity:
    if type(value) is not list or len(value) != 4 or {type(part) for part in value} != {int}:
        raise ValueError("an entry should be four numbers")
    return value
