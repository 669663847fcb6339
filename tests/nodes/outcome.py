"""What came of a fault: seen from what ranks and agents have written down, and from the records on storage."""

from __future__ import annotations

import itertools
import re
import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from rekindle.errors import FormatError
from rekindle.memory.fault import Fault
from rekindle.memory.incident import SECURED, Incident
from tests.nodes.job import Job

__all__ = ["Outcome", "observe", "that_stands"]


@dataclass
class Outcome:
    """What came of a case. Seconds since the fault."""

    noticed: dict[str, tuple[float, str]] = field(default_factory=dict)
    """By node: when its agent noted the first fault, and the words that stand for it."""
    silent: dict[str, dict[str, float]] = field(default_factory=dict)
    """By node, and by the other one that it named: when its agent first told people that this one is silent."""
    trained: tuple[str, ...] = ()
    """Nodes on which the start trained that the fault struck."""
    gone: dict[str, float] = field(default_factory=dict)
    """Nodes that were lost, and when."""
    unheard: dict[str, tuple[float, tuple[str, ...]]] = field(default_factory=dict)
    """Nodes that lost their power: when, and those that trained with them and were left."""
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
    away: int = 0
    """Steps in which none came to be safe as an agent was away."""
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
            stands = that_stands(late)
            out.noticed[name] = late[0].noticed - struck, f"{stands.cause}: {stands.what}"
    for name, log in job.agent_logs.items():
        if found := {who: at - struck for who, at in _silences(log) if at >= struck}:
            out.silent[name] = found
    out.trained = _hosts(job, struck)
    lost = {node.name: node for node in job.lab.nodes if not node.alive}
    out.gone = {name: node.lost_at - struck for name, node in lost.items()}
    for name, node in lost.items():
        left = [
            host for host in _hosts(job, node.lost_at) if not (host in lost and lost[host].lost_at < node.lost_at + 2)
        ]
        if node.silently and name in _hosts(job, node.lost_at):
            out.unheard[name] = node.lost_at - struck, tuple(left)
    out.away = job.away
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


def that_stands(faults: list[Fault]) -> Fault:
    """What a node says of the first of these faults in the end.

    An agent that learns of an earlier cause of the same start puts it in place of what followed from it
    (``agent/first_cause.py``). What a later start ended by is another fault.
    """
    return [fault for fault in faults if fault.generation == faults[0].generation][-1]


def _hosts(job: Job, at: float) -> tuple[str, ...]:
    """The nodes of the newest start of which all ranks had met by then."""
    met = [row for row in job.rows("met") if row["t"] <= at]
    starts = [row["start"] for row in met if sum(other["start"] == row["start"] for other in met) == job.task.world]
    return tuple(sorted({row["host"] for row in met if row["start"] == max(starts, default=-1)}))


def _first(job: Job, start: int) -> int:
    """The step from which a start went on."""
    return next(int(row["step"]) for row in job.rows("restored") if row["start"] == start)


def _of(rows: list[dict[str, Any]], start: int, rank: int) -> list[dict[str, Any]]:
    return [row for row in rows if row["start"] == start and row["rank"] == rank]


def _silences(log: str) -> list[tuple[str, float]]:
    """Nodes that are silent by an agent's log, and times of that by the monotonic clock, newest first."""
    since = time.time() - time.monotonic()
    lines = re.findall(r"^(\S+ \S+),(\d+) WARNING node (\S+) .* is silent", log, re.MULTILINE)
    return [
        (name, time.mktime(time.strptime(at, "%Y-%m-%d %H:%M:%S")) + int(ms) / 1e3 - since)
        for at, ms, name in reversed(lines)
    ]


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
