"""What a rank is doing, on one mapped page: written without a system call, read by anybody, also after its death."""

from __future__ import annotations

import mmap
import os
import struct
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rekindle.errors import FormatError

__all__ = ["DONE", "STABLE", "STARTING", "STEPPING", "UPDATING"]
__all__ += ["FAILED", "SECURED", "SECURING", "TRAINING"]
__all__ += ["DOES", "PHASES", "STAGES", "Reader", "Status", "StatusPage", "read_status"]

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
_RECORD = struct.Struct("<QQqqqqqqdQ64s")
_COUNT = struct.Struct("Q")  # native: stored as one word
_AT = (64, 64 + 256)
"""First bytes of the two records. The count of writes, at byte 8, tells by its last bit which one holds."""
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

    @property
    def age(self) -> float:
        """Seconds since the last progress."""
        return (time.monotonic_ns() - self.progress) / 1e9


class StatusPage:
    """This rank's page. Fields are set, then ``write`` shows all of them at once. For one thread at a time.

    A write takes about a microsecond: one record of two is filled, then one word says that it holds. So a death in
    the middle leaves the record before.
    """

    def __init__(self, path: Path | None, generation: int) -> None:
        """Make the page anew; without a path one that nobody else sees. Raises OSError when memory is full."""
        temporary = path and path.with_name(f".{path.name}.{os.getpid()}.tmp")
        self._map = _allocate(temporary) if temporary else mmap.mmap(-1, _SIZE)
        self._pid, self._generation, self._count = os.getpid(), generation, 0
        self.phase, self.stage, self.paused = STARTING, TRAINING, False
        self.step = self.snapshot = self.secured = -1
        self.longest = 0.0
        self.progress = time.monotonic_ns()
        self.note = b""
        self._map[:8] = _MAGIC
        self.write()
        if temporary and path:
            os.replace(temporary, path)  # an earlier process's page stays as it is for whoever has it mapped

    def write(self) -> None:
        self._count += 1
        _RECORD.pack_into(
            *(self._map, _AT[self._count & 1], self._pid, self._generation, self.phase, self.stage, self.paused),
            *(self.step, self.snapshot, self.secured, self.longest, self.progress, self.note),
        )
        _COUNT.pack_into(self._map, 8, self._count)


def _allocate(path: Path) -> mmap.mmap:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(fd, 0, _SIZE) if hasattr(os, "posix_fallocate") else os.ftruncate(fd, _SIZE)
        return mmap.mmap(fd, _SIZE)
    except OSError:
        path.unlink(missing_ok=True)
        raise
    finally:
        os.close(fd)


class Reader:
    """Somebody else's page, mapped once and looked at often."""

    def __init__(self, path: Path) -> None:
        """Raises FileNotFoundError, and FormatError when the file is something else."""
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            if os.fstat(fd).st_size != _SIZE:
                raise FormatError(f"{path}: is not a status page")
            self._map = mmap.mmap(fd, _SIZE, access=mmap.ACCESS_READ)
        finally:
            os.close(fd)
        if self._map[:8] != _MAGIC:
            raise FormatError(f"{path}: is not a status page")

    def read(self) -> Status:
        while True:
            (count,) = _COUNT.unpack_from(self._map, 8)
            fields = _RECORD.unpack_from(self._map, _AT[count & 1])
            if _COUNT.unpack_from(self._map, 8) == (count,):  # else perhaps into what was just read
                note = fields[-1].rstrip(b"\0").decode("utf-8", "replace")
                values: tuple[Any, ...] = (*fields[:-1], note)
                return Status(*values)


def read_status(path: Path) -> Status:
    """One look at a page. Raises FileNotFoundError and FormatError."""
    return Reader(path).read()
