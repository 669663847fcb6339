"""Bounds a job's part of the memory store, and reserves the headroom that other programs need there."""

from __future__ import annotations

import os
from dataclasses import dataclass

from rekindle.memory.job_dir import JobDir

__all__ = ["Room"]

_SHARED = "/dev/shm"
"""File system in which a ``DataLoader``'s workers put their batches, whatever memory store a job has."""

_HEADROOM, _PART = 64 << 20, 4
"""Least headroom in bytes, and the divisor that gives it from the file system's size. A data loader's worker that finds
no room there dies of SIGBUS."""

_ALIKE = 16
"""Divisor: the part of a job's memory by which an estimate may be too low, for names and counters that optimizers
have not made yet at the start."""

_SLACK = 1 << 20
"""Bytes that must be free beside the snapshots, for receipts and the job's small files."""


@dataclass(frozen=True)
class Room:
    """Bounds the memory that a job takes on a node."""

    limit: int | None = None
    """Most bytes of all snapshots of the job on the node; None for no limit."""
    reserved: int | None = None
    """Headroom in bytes. None: a quarter of the file system and at least 64 MiB if it is that of /dev/shm; 0 on another
    one, where no other program is expected."""

    def headroom(self, job: JobDir) -> int:
        """Returns the bytes of the file system that must stay free. Raises OSError."""
        if self.reserved is not None:
            return self.reserved
        if not os.path.isdir(_SHARED) or os.stat(job.path).st_dev != os.stat(_SHARED).st_dev:
            return 0
        return max(_HEADROOM, job.total_bytes() // _PART)

    def limit_per_rank(self, ranks: int) -> int | None:
        """Returns the part of the limit, in bytes, of each of the node's ``ranks``; None without a limit."""
        return None if self.limit is None else self.limit // ranks

    def describe_shortage(self, job: JobDir, nbytes: int, ranks: int) -> str | None:
        """Describes why two snapshots of ``nbytes`` for each of ``ranks`` ranks don't fit; None if they do.

        The headroom doesn't count for a restarted job whose files already hold the memory: it takes no more.
        """
        need, held, free = 2 * nbytes * ranks, _held(job), job.free_bytes()
        asks = f"two snapshots of about {_mb(nbytes)} for each of {ranks} rank(s) need {_mb(need)}"
        if self.limit is not None and need > self.limit:
            return f"memory store {job.path.parent}: {asks}, memory_limit is {_mb(self.limit)}: raise it"
        headroom = self.headroom(job) if need - held > need // _ALIKE else 0
        if need + headroom <= held + free and free >= _SLACK:
            return None
        room = f"{_mb(free)} are free" + (f" beside {_mb(held)} of this job" if held > _SLACK else "")
        advice = f"give it {self._enough(job, need, held, free) >> 20} MiB (a container: --shm-size)"
        if headroom:
            room += f", and {_mb(headroom)} are to be left to others, such as a DataLoader's workers"
            advice += ", or lower memory_headroom"
        return f"memory store {job.path.parent}: {asks}, {room}: {advice}"

    def _enough(self, job: JobDir, need: int, held: int, free: int) -> int:
        """Returns the size, in bytes and rounded up to whole MiB, of a file system that would be large enough."""
        taken = job.total_bytes() - free - held + need
        enough = taken + _SLACK + (self.headroom(job) if self.reserved is not None else 0)
        if self.reserved is None and self.headroom(job):
            enough = max(taken + _HEADROOM, taken * _PART // (_PART - 1))
        return enough + (1 << 20) - 1

    def describe(self, job: JobDir, nbytes: int, ranks: int) -> str:
        """Describes the memory that two snapshots of each rank take, and how much is left."""
        need, headroom = 2 * nbytes * ranks, self.headroom(job)
        left = max(0, job.free_bytes() + _held(job) - need)
        kept = f", of which {_mb(headroom)} are reserved for other programs, except in a dying gasp" if headroom else ""
        return (
            f"memory store {job.path.parent}: snapshots take {_mb(need)}, half as much again during a drain if there "
            f"is room; {_mb(left)} are left{kept}"
        )


def _held(job: JobDir) -> int:
    """Returns the bytes that snapshots can use again: those of copies of another node's stay."""
    return job.held_bytes() - job.copies.held_bytes()


def _mb(nbytes: int) -> str:
    return f"{nbytes / 1e6:,.1f} MB"
