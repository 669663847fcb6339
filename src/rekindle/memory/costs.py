"""Shows what saving has cost a rank on one page of memory, which other processes read, also after the rank's death."""

from __future__ import annotations

import math
import os
import struct
import zlib
from array import array
from bisect import bisect_left
from contextlib import suppress
from dataclasses import dataclass, field
from io import FileIO
from pathlib import Path

from rekindle.errors import FormatError
from rekindle.memory.job_dir import JobDir

__all__ = ["BOUNDS", "CostPage", "Costs", "Histogram", "cost_page", "rank_costs", "read_costs"]

BOUNDS = (1e-4, 3e-4, 1e-3, 3e-3, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)
"""Upper bounds of a histogram's buckets in seconds: three times as much from one to the next. The last one has none."""

_BUCKETS = len(BOUNDS) + 1
_MAGIC = b"RKCOST01"
_NUMBERS = (
    *("pid", "generation", "step", "steps", "saves", "snapshot_bytes", "failed", "left_out", "direct"),
    *("memory_lost", "agent_lost", "snapshot_every", "restored_step"),
)
_SECONDS = ("snapshot_seconds", "restore_seconds")
_HEAD = struct.Struct(f"=8s{len(_NUMBERS)}q{len(_SECONDS) + 2}d")
"""Magic, numbers, seconds, and the sums of both histograms. Their counts follow."""
_COUNTS = 8 * _BUCKETS
_CHECK = struct.Struct("=I")
"""Checksum behind the record, by which a reader knows one that is half written: the kernel copies in no known order."""
_SIZE = _HEAD.size + 2 * _COUNTS + _CHECK.size
_TRIES = 100
"""Readings of a page that is just being written."""


@dataclass
class Histogram:
    """Counts durations by their lengths."""

    counts: array[int] = field(default_factory=lambda: array("Q", [0] * _BUCKETS))
    """By bucket: those above the bound before, up to its own."""
    total: float = 0.0
    """Their sum in seconds."""

    def add(self, seconds: float) -> None:
        """Count one duration."""
        self.counts[bisect_left(BOUNDS, seconds)] += 1
        self.total += seconds

    @property
    def count(self) -> int:
        """Number of durations."""
        return sum(self.counts)

    @property
    def mean(self) -> float | None:
        """Mean in seconds; None of none."""
        return self.total / self.count if self.count else None

    def quantile(self, share: float) -> float | None:
        """Bound of the bucket that has the quantile ``share``, at least as long as it; None of none, inf of longer."""
        rank, seen = share * self.count, 0
        for bound, number in zip((*BOUNDS, math.inf), self.counts, strict=True):
            seen += number
            if number and seen >= rank:
                return bound
        return None


@dataclass
class Costs:
    """Costs of saving of one rank since its start. Sizes in bytes, times in seconds."""

    pid: int = 0
    generation: int = 0
    """Generation of the start."""
    step: int = 0
    """Newest completed step, or the one that was restored."""
    steps: int = 0
    """Steps completed in this start."""
    saves: int = 0
    snapshot_bytes: int = 0
    """Bytes of these saves."""
    failed: int = 0
    """Saves that failed."""
    left_out: int = 0
    """Steps that were due and have no snapshot, because memory for it was still being made."""
    direct: int = 0
    """Saves that went straight to storage."""
    memory_lost: int = 0
    """Times that memory would take no more saves."""
    agent_lost: int = 0
    """Times that no agent could be had."""
    snapshot_every: int = 1
    """Steps between snapshots, as it is now."""
    restored_step: int = 0
    snapshot_seconds: float = 0.0
    """Time from the begin of each snapshot to its commit, beside training or not, all in all."""
    restore_seconds: float = 0.0
    stalls: Histogram = field(default_factory=Histogram)
    """Times for which saves held training up. That of the newest one counts from the next ``step()`` on."""
    step_seconds: Histogram = field(default_factory=Histogram)
    """Times from one ``step()`` to the next, pauses included."""


class CostPage:
    """Writes this rank's page, whole, by one call. For one thread at a time.

    It is not mapped: a store into a mapping that somebody truncated would end this process with SIGBUS.
    """

    def __init__(self, path: Path) -> None:
        """Makes a new page. Raises OSError when memory is full."""
        self._path = path
        self._file = self._make()

    def _make(self) -> FileIO:
        temporary = self._path.with_name(f".{self._path.name}.{os.getpid()}.tmp")
        file = FileIO(os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600), "r+")
        try:
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(file.fileno(), 0, _SIZE)
            os.replace(temporary, self._path)  # readers that have an earlier process's page open keep it
        except OSError:
            temporary.unlink(missing_ok=True)
            raise
        return file

    def install(self) -> None:
        """Makes the page again, which somebody has removed. Raises OSError when memory is full."""
        self._file = self._make()

    def write(self, costs: Costs) -> None:
        """Shows ``costs`` to readers. Never fails: without memory the page keeps what it had."""
        stalls, steps = costs.stalls, costs.step_seconds
        head = _HEAD.pack(
            _MAGIC,
            *(costs.pid, costs.generation, costs.step, costs.steps, costs.saves, costs.snapshot_bytes, costs.failed),
            *(costs.left_out, costs.direct, costs.memory_lost, costs.agent_lost, costs.snapshot_every),
            *(costs.restored_step, costs.snapshot_seconds, costs.restore_seconds, stalls.total, steps.total),
        )
        record = head + stalls.counts.tobytes() + steps.counts.tobytes()
        try:  # without suppress(), which takes longer than the kernel's copy
            os.pwrite(self._file.fileno(), record + _CHECK.pack(zlib.crc32(record)), 0)
        except OSError:  # only if somebody truncated the page and memory is full
            pass


def cost_page(directory: Path, rank: int) -> Path:
    """Returns the page of a rank in a job's directory."""
    return directory / f"rank-{rank:05d}.costs"


def read_costs(path: Path) -> Costs:
    """Reads a page. Raises OSError, or FormatError when the file is none or is damaged."""
    with FileIO(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW)) as file:
        for _ in range(_TRIES):
            page = os.pread(file.fileno(), _SIZE, 0)
            if len(page) < _SIZE or not page.startswith(_MAGIC):
                break
            if page[-_CHECK.size :] == _CHECK.pack(zlib.crc32(page[: -_CHECK.size])):
                return _decode(path, page)
    raise FormatError(f"{path}: is not a page of costs")


def _decode(path: Path, page: bytes) -> Costs:
    _, *fields = _HEAD.unpack_from(page)
    *seconds, stalls, steps = fields[len(_NUMBERS) :]
    if not all(0 <= one < math.inf for one in (*seconds, stalls, steps)):
        raise FormatError(f"{path}: is not a page of costs")
    counts = [array("Q", page[at : at + _COUNTS]) for at in (_HEAD.size, _HEAD.size + _COUNTS)]
    told = dict(zip((*_NUMBERS, *_SECONDS), fields, strict=False))
    return Costs(**told, stalls=Histogram(counts[0], stalls), step_seconds=Histogram(counts[1], steps))


def rank_costs(job: JobDir) -> dict[int, Costs]:
    """Returns the pages of this node's ranks, of those of the newest start that has any.

    A rank of an earlier start than another one's has not come back yet, or was moved to another node.
    """
    found = {}
    with suppress(OSError, FormatError):
        info = job.read_job()
        for rank in info.ranks if info is not None else ():
            with suppress(OSError, FormatError):
                found[rank] = read_costs(cost_page(job.path, rank))
    newest = max((costs.generation for costs in found.values()), default=0)
    return {rank: costs for rank, costs in found.items() if costs.generation == newest}
