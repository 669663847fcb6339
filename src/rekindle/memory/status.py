"""What a rank is doing, on one page in memory: read by anybody, also after its death."""

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
__all__ += ["DOES", "PHASES", "STAGES", "StatusReader", "Status", "StatusPage", "read_status"]

STARTING, STABLE, UPDATING, STEPPING, DONE = range(5)
PHASES = ("starting", "stable", "updating", "stepping", "done")
"""``stable``: the state is that of ``step``. ``updating``: an optimizer is at it, or has been. ``stepping``: inside of
``ckpt.step()``. ``done``: the guarded part has ended as it should."""

DOES = ("starting", "before its next update", "in its update", "in ckpt.step()", "done")
"""The same for people."""

TRAINING, SECURING, SECURED, FAILED = range(4)
STAGES = ("training", "securing", "secured", "failed")
"""After a fault: ``securing`` the state, then it is ``secured``, or could not be (``failed``); then the rank ends."""

_MAGIC = b"RKSTAT01"
_RECORD = struct.Struct("<QQqqqqqqdQ64sd")
"""Its last field is newer than the others. In a page that an older version has written it is 0."""
_HEAD = struct.Struct("8sQ")
"""Magic, and the count of writes, whose last bit tells which of the two records holds."""
_AT = (64, 64 + 256)
"""First bytes of the two records."""
_SIZE = 4096


@dataclass(frozen=True)
class Status:
    """One look at a status page. Steps are -1 while there are none."""

    pid: int
    generation: int
    phase: int
    stage: int
    paused: int
    """Not 0 while the watchdog was told to wait."""
    step: int
    """Completed updates."""
    snapshot: int
    """Newest step of this rank that is in memory."""
    secured: int
    """Newest step that was secured because of a fault."""
    longest: float
    """Longest of the recent steps, in seconds; 0 as long as there were too few to tell."""
    progress: int
    """``time.monotonic_ns()`` of the last progress, by this node's clock."""
    note: str
    """What the rank is doing, in its own words."""
    pause: float
    """Longest time between two steps that this rank of the job has ever taken, but for pauses that it declared, in
    seconds. Earlier starts on this node count."""

    @property
    def age(self) -> float:
        """Seconds since the last progress."""
        return (time.monotonic_ns() - self.progress) / 1e9


class StatusPage:
    """This rank's page. Fields are set, then ``write`` shows all of them at once. For one thread at a time.

    A write takes four microseconds: one record of two is filled, then one word says that it holds. So a death in the
    middle leaves the record before. Nothing is mapped: a store into a page that somebody has truncated would end this
    process with SIGBUS, where a write mends it.
    """

    def __init__(self, path: Path | None, generation: int) -> None:
        """Make the page anew; without a path one that nobody sees. Raises OSError when memory is full."""
        self._path = path
        self._file: FileIO | None = None
        self._pid, self._generation, self._count = os.getpid(), generation, 0
        self.phase, self.stage, self.paused = STARTING, TRAINING, False
        self.step = self.snapshot = self.secured = -1
        self.longest, self.pause = 0.0, _pause_of(path)
        self.progress = time.monotonic_ns()
        self.note = b""
        self.place()

    def place(self) -> None:
        """Put the page where others look for it, once more if somebody has removed it. Raises OSError."""
        if self._path is None:
            return
        temporary = self._path.with_name(f".{self._path.name}.{os.getpid()}.tmp")
        self._file = _allocate(temporary)
        self.write()
        os.replace(temporary, self._path)  # an earlier process's page stays as it is for whoever has it open

    def write(self) -> None:
        if self._file is None:
            return
        self._count += 1
        record = _RECORD.pack(
            *(self._pid, self._generation, self.phase, self.stage, self.paused),
            *(self.step, self.snapshot, self.secured, self.longest, self.progress, self.note),
            self.pause,
        )
        with suppress(OSError):  # a page that can't be written has been truncated, and memory is full
            os.pwrite(self._file.fileno(), record, _AT[self._count & 1])
            os.pwrite(self._file.fileno(), _HEAD.pack(_MAGIC, self._count), 0)


def _pause_of(path: Path | None) -> float:
    """What an earlier start of this rank knew of the job's pauses."""
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
    """Somebody else's page, opened once and looked at often: 5 microseconds each."""

    def __init__(self, path: Path) -> None:
        """Raises FileNotFoundError, and FormatError when the file is something else."""
        self._path = path
        self._file = FileIO(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW))
        self.read()

    def read(self) -> Status:
        """What the page says. Raises FormatError when somebody has damaged it; its owner's next write mends it."""
        fd, end = self._file.fileno(), _AT[-1] + _RECORD.size
        while True:
            page = os.pread(fd, end, 0)
            magic, count = _HEAD.unpack_from(page.ljust(_HEAD.size))
            at = _AT[count & 1]
            if magic != _MAGIC or len(page) < at + _RECORD.size:
                raise FormatError(f"{self._path}: is not a status page")
            if os.pread(fd, _HEAD.size, 0) == page[: _HEAD.size]:  # else perhaps into what was just read
                *fields, note, pause = _RECORD.unpack_from(page, at)
                values: tuple[Any, ...] = (*fields, note.rstrip(b"\0").decode("utf-8", "replace"), pause)
                return self._sensible(Status(*values))

    def _sensible(self, found: Status) -> Status:
        times = 0 <= found.longest < math.inf and 0 <= found.pause < math.inf
        if found.phase in range(len(PHASES)) and found.stage in range(len(STAGES)) and times:
            return found
        raise FormatError(f"{self._path}: is not a status page")


def read_status(path: Path) -> Status:
    """One look at a page. Raises FileNotFoundError and FormatError."""
    return StatusReader(path).read()
