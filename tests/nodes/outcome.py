"""What came of a fault: seen from what ranks and agents have written down, and from the records on storage."""

from __future__ import annotations

import itertools
import re
import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from rekindle.errors import FormatError
from rekindle.memory.incident import SECURED, Incident
from tests.nodes.job import Job

__all__ = ["Outcome", "observe"]


@dataclass
class Outcome:
    """What came of a case. Seconds since the fault."""

    noticed: dict[str, tuple[float, str]] = field(default_factory=dict)
    """By node: when its agent noted the fault, and its words."""
    silent: dict[str, float] = field(default_factory=dict)
    """By node: when its agent told people that another one is silent."""
    secured: float | None = None
    """When the last rank that still could had secured its state."""
    resumed: int = -1
    """Step from which the first restart went on."""
    places: list[str] = field(default_factory=list)
    """Where each rank's state came from then."""
    restarts: int = 0
    lost: int = 0
    """Most steps that all ranks had completed, and of which a restart knew nothing."""
    again: float | None = None
    """When all ranks had completed the first new step."""
    sources: set[str] = field(default_factory=set)
    """Where any rank's state came from at any restart."""
    interval: int = 0
    """Most steps between two that were safe from the loss of a node, as ranks knew it."""
    forgotten: list[tuple[int, int]] = field(default_factory=list)
    """Such steps, and the older ones from which a restart went on."""
    digests: dict[tuple[int, int], str] = field(default_factory=dict)
    """Of each rank's each step: the newest one, if it was computed twice."""
    differing: list[tuple[int, int]] = field(default_factory=list)
    """Ranks and steps that were computed twice, and not alike."""


def observe(job: Job, struck: float) -> Outcome:
    out = Outcome()
    for name, faults in job.faults.items():
        if late := [fault for fault in faults if fault.noticed >= struck]:
            out.noticed[name] = late[0].noticed - struck, f"{late[-1].cause}: {late[-1].what}"
    out.silent = {name: at - struck for name, log in job.agent_logs.items() for at in _silences(log) if at >= struck}
    starts = sorted({row["start"] for row in job.rows("restored")})
    out.restarts = len(starts) - 1
    steps = job.rows("step")
    for row in steps:
        key = row["rank"], row["step"]
        if out.digests.setdefault(key, row["digest"]) != row["digest"]:
            out.differing.append(key)
    for start in starts:
        safe = [_first(job, start), *job.safe_steps(start)]
        out.interval = max(out.interval, *(new - old for old, new in itertools.pairwise(safe)), 0)
    for start, after in itertools.pairwise(starts):
        restored = sorted((row for row in job.rows("restored") if row["start"] == after), key=_by_rank)
        done = [
            max((r["step"] for r in _of(steps, start, k)), default=_first(job, start)) for k in range(job.task.world)
        ]
        out.lost = max(out.lost, min(done) - restored[0]["step"])
        out.sources |= {row["place"] for row in restored}
        out.forgotten += [
            (safe, _first(job, after)) for safe in job.safe_steps(start)[-1:] if safe > _first(job, after)
        ]
        if start == starts[0]:
            out.resumed, out.places = restored[0]["step"], [row["place"] for row in restored]
    if out.restarts:
        out.again = max(_of(steps, starts[-1], k)[0]["t"] for k in range(job.task.world)) - struck
        out.secured = _secured(job, struck)
    return out


def _first(job: Job, start: int) -> int:
    """The step from which a start went on."""
    return next(int(row["step"]) for row in job.rows("restored") if row["start"] == start)


def _of(rows: list[dict[str, Any]], start: int, rank: int) -> list[dict[str, Any]]:
    return [row for row in rows if row["start"] == start and row["rank"] == rank]


def _silences(log: str) -> list[float]:
    """Times by the monotonic clock at which an agent's log first has a node silent, newest first."""
    since = time.time() - time.monotonic()
    lines = re.findall(r"^(\S+ \S+),(\d+) WARNING node \S+ .* is silent", log, re.MULTILINE)
    return [time.mktime(time.strptime(at, "%Y-%m-%d %H:%M:%S")) + int(ms) / 1e3 - since for at, ms in reversed(lines)]


def _by_rank(row: dict[str, Any]) -> int:
    return int(row["rank"])


def _secured(job: Job, struck: float) -> float | None:
    """As the records on storage have it, of each node that has written one."""
    times = []
    for path in (job.lab.storage / "run" / "incidents").glob("*.jsonl"):
        with suppress(FormatError):
            moments = Incident.decode(path.read_bytes()).moments
            times += [at - struck for name, at in moments.items() if name == SECURED and at > struck]
    return max(times, default=None)
