"""Shows a rank's progress on one page of memory, which other processes read, also after the rank's death."""

from __future__ import annotations

import math
import os
import struct
import time
from contextlib import suppress
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any

from rekindle.errors import FormatError

__all__ = ["DONE", "STABLE", "STARTING", "STEPPING", "UPDATING"]
__all__ += ["FAILED", "SECURED", "SECURING", "TRAINING"]
__all__ += ["PHASE_TEXTS", "PHASES", "STAGES", "StatusReader", "Status", "StatusPage", "describe_status", "read_status"]

STARTING, STABLE, UPDATING, STEPPING, DONE = range(5)
PHASES = ("starting", "stable", "updating", "stepping", "done")
"""Names of the phases. ``stable``: the state is that of ``step``. ``updating``: an optimizer has begun to change it.
``stepping``: inside of ``ckpt.step()``. ``done``: the guarded part ended without a fault."""

PHASE_TEXTS = ("starting", "before its next update", "in its update", "in ckpt.step()", "done")
"""The phases in words for people."""

TRAINING, SECURING, SECURED, FAILED = range(4)
STAGES = ("training", "securing", "secured", "failed")
"""Names of the stages of the dying gasp. After a fault a rank is ``securing`` its state, then that is ``secured``, or
has ``failed``. Then the rank ends."""

_MAGIC = b"RKSTAT01"
_RECORD = struct.Struct("<QQqqqqqqdQ64sd")
"""One record. Its last field is newer than the others: 0 in a page that an older version wrote."""
_HEAD = struct.Struct("8sQ")
"""Magic, and the count of writes, whose last bit selects the valid one of the two records."""
_AT = (64, 64 + 256)
"""Offsets of the two records."""
_SIZE = 4096


@dataclass(frozen=True)
class Status:
    """Holds one reading of a status page. A step is -1 while there is none."""

    pid: int
    generation: int
    phase: int
    """Index into ``PHASES``."""
    stage: int
    """Index into ``STAGES``."""
    paused: int
    """Not 0 while the rank has paused the watchdog."""
    step: int
    """Number of completed updates."""
    snapshot: int
    """Newest step that this rank has in memory."""
    secured: int
    """Newest step that the rank secured because of a fault."""
    longest: float
    """Longest of the recent steps, in seconds; 0 while there were too few."""
    progress: int
    """Time of the last progress, by this node's ``time.monotonic_ns()``."""
    note: str
    """Further words of the rank on its progress."""
    pause: float
    """Longest time between two steps of this rank, in seconds, without pauses that it declared. Earlier starts of the
    job on this node count."""

    @property
    def age(self) -> float:
        """Seconds since the last progress."""
        return (time.monotonic_ns() - self.progress) / 1e9


def describe_status(page: Status) -> dict[str, Any]:
    """Returns what a page says as JSON, for people and programs."""
    return {
        "phase": "paused" if page.paused else STAGES[page.stage] if page.stage else PHASES[page.phase],
        "does": "pauses" if page.paused else STAGES[page.stage] if page.stage else PHASE_TEXTS[page.phase],
        "step": page.step,
        "in_memory": page.snapshot if page.snapshot >= 0 else None,
        "age": round(page.age, 3),
        "longest_step": round(page.longest, 3),
        "note": page.note,
    }


class StatusPage:
    """Writes this rank's page. Fields are set, then ``write`` shows all of them at once. For one thread at a time.

    A write takes four microseconds: it fills one of two records, then changes one word to select it. A death in between
    leaves the record before. The page is not mapped: a store into a mapping that somebody truncated would end this
    process with SIGBUS, while a write restores the file.
    """

    def __init__(self, path: Path | None, generation: int) -> None:
        """Makes a new page; without a path, one that no other process sees. Raises OSError when memory is full."""
        self._path = path
        self._file: FileIO | None = None
        self._pid, self._generation, self._count = os.getpid(), generation, 0
        self.phase, self.stage, self.paused = STARTING, TRAINING, False
        self.step = self.snapshot = self.secured = -1
        self.longest, self.pause = 0.0, _pause_of(path)
        self.progress = time.monotonic_ns()
        self.note = b""
        self.install()

    def install(self) -> None:
        """Puts the page at its path, again if somebody removed it. Raises OSError when memory is full."""
        if self._path is None:
            return
        temporary = self._path.with_name(f".{self._path.name}.{os.getpid()}.tmp")
        self._file = _allocate(temporary)
        self.write()
        os.replace(temporary, self._path)  # readers that have an earlier process's page open keep it

    def write(self) -> None:
        """Shows the fields to readers. Never fails: without memory the page keeps what it had."""
        if self._file is None:
            return
        self._count += 1
        record = _RECORD.pack(
            *(self._pid, self._generation, self.phase, self.stage, self.paused),
            *(self.step, self.snapshot, self.secured, self.longest, self.progress, self.note),
            self.pause,
        )
        with suppress(OSError):  # only if somebody truncated the page and memory is full
            os.pwrite(self._file.fileno(), record, _AT[self._count & 1])
            os.pwrite(self._file.fileno(), _HEAD.pack(_MAGIC, self._count), 0)


def _pause_of(path: Path | None) -> float:
    """Returns the longest pause that an earlier start of this rank noted; 0 without a readable page."""
    if path is not None:
        with suppress(OSError, FormatError):
            return read_status(path).pause
    return 0.0


def _allocate(path: Path) -> FileIO:
    file = FileIO(os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600), "r+")
    try:
        os.posix_fallocate(file.fileno(), 0, _SIZE) if hasattr(os, "posix_fallocate") else file.truncate(_SIZE)
        return file
    except OSError:
        path.unlink(missing_ok=True)
        raise


class StatusReader:
    """Reads another process's page: opened once, 5 microseconds for each reading. For one thread at a time."""

    def __init__(self, path: Path) -> None:
        """Opens the page. Raises FileNotFoundError, or FormatError when the file is not a status page."""
        self._path = path
        self._file = FileIO(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW))
        self.read()

    def read(self) -> Status:
        """Returns the valid record. Raises FormatError when the page is damaged; its owner's next write repairs it."""
        fd, end = self._file.fileno(), _AT[-1] + _RECORD.size
        while True:
            page = os.pread(fd, end, 0)
            magic, count = _HEAD.unpack_from(page.ljust(_HEAD.size))
            at = _AT[count & 1]
            if magic != _MAGIC or len(page) < at + _RECORD.size:
                raise FormatError(f"{self._path}: is not a status page")
            if (
                os.pread(fd, _HEAD.size, 0) == page[: _HEAD.size]
            ):  # else its owner may have written into the record just read: once more
                *fields, note, pause = _RECORD.unpack_from(page, at)
                values: tuple[Any, ...] = (*fields, note.rstrip(b"\0").decode("utf-8", "replace"), pause)
                return self._sensible(Status(*values))

    def _sensible(self, found: Status) -> Status:
        times = 0 <= found.longest < math.inf and 0 <= found.pause < math.inf
        if found.phase in range(len(PHASES)) and found.stage in range(len(STAGES)) and times:
            return found
        raise FormatError(f"{self._path}: is not a status page")


def read_status(path: Path) -> Status:
    """Reads a page once. Raises FileNotFoundError or FormatError."""
    return StatusReader(path).read()
