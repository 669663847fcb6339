"""Room in the memory store: a job's part of it, and what is left to others there, data loaders above all."""

from __future__ import annotations

import os
from dataclasses import dataclass

from rekindle.memory.job_dir import JobDir

__all__ = ["Room"]

_SHARED = "/dev/shm"
"""Where a ``DataLoader``'s workers put their batches, whatever memory store a job has."""

_HEADROOM, _PART = 64 << 20, 4
"""Bytes left to others there at least, and the part of the file system. A worker that finds no room dies of SIGBUS."""

_ALIKE = 16
"""Part of a job's memory by which a start may misjudge it: names and counters that optimizers have not made yet."""

_SLACK = 1 << 20
"""Bytes that must be free beside the snapshots, for receipts and the job's small files."""


@dataclass(frozen=True)
class Room:
    """What a job may take of a node's memory store."""

    limit: int | None = None
    """Bytes that all snapshots of the job may hold."""
    spared: int | None = None
    """Bytes of the file system to leave to others. None: a quarter and at least 64 MiB of the one that /dev/shm is, and
    nothing of another one, where nobody else is expected."""

    def headroom(self, job: JobDir) -> int:
        """Bytes that must stay free. Raises OSError when the file system can't be asked."""
        if self.spared is not None:
            return self.spared
        if not os.path.isdir(_SHARED) or os.stat(job.path).st_dev != os.stat(_SHARED).st_dev:
            return 0
        return max(_HEADROOM, job.total_bytes() // _PART)

    def share(self, ranks: int) -> int | None:
        """Bytes that each rank of a node may hold of the limit, if there is one."""
        return None if self.limit is None else self.limit // ranks

    def lacking(self, job: JobDir, nbytes: int, ranks: int) -> str | None:
        """Why it can't hold two snapshots of ``nbytes`` of each of ``ranks`` ranks; None when it can.

        A job that comes back to memory that it holds already takes next to nothing from anybody.
        """
        need, held, free = 2 * nbytes * ranks, job.held_bytes(), job.free_bytes()
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
        """Bytes, rounded up to whole MiB, of a file system on which ``need`` of them would do."""
        taken = job.total_bytes() - free - held + need
        enough = taken + _SLACK + (self.headroom(job) if self.spared is not None else 0)
        if self.spared is None and self.headroom(job):
            enough = max(taken + _HEADROOM, taken * _PART // (_PART - 1))
        return enough + (1 << 20) - 1

    def told(self, job: JobDir, nbytes: int, ranks: int) -> str:
        """What two snapshots of each rank take, and what they leave."""
        need, headroom = 2 * nbytes * ranks, self.headroom(job)
        left = max(0, job.free_bytes() + job.held_bytes() - need)
        kept = f", of which {_mb(headroom)} stay with others, but for dying gasps" if headroom else ""
        return (
            f"memory store {job.path.parent}: snapshots take {_mb(need)}, half as much again while one is drained and "
            f"there is room; {_mb(left)} are left{kept}"
        )


def _mb(nbytes: int) -> str:
    return f"{nbytes / 1e6:,.1f} MB"
