"""Shows jobs as lines of one table, as ``top`` does, for ``status --watch``.

Beside each job stand the newest steps that all ranks have completed, that are in memory, that survive the loss of a
node, and that are on storage.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from rekindle.cli.terminal import make_table

__all__ = ["Board"]

_SPAN = 10.0
"""Seconds over which a job's speed is measured."""


class Board:
    """Makes the table, and remembers what the one before it has shown, from which it computes speeds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._steps: dict[str, deque[tuple[float, int]]] = {}
        """By job: when it was seen at which step."""

    def table(self, jobs: Sequence[dict[str, Any]]) -> Table:
        """Returns the table of ``job_status`` of each job: those with a problem first, then by their steps."""
        table = make_table(
            *("job", "ranks", "step", "per s", "memory", "safe", "durable", "drain", "does"),  # 80 columns are enough
            may_fold=("job", "does"),
        )
        names = [str(job["root"] or job["directory"]) for job in jobs]
        self._steps = {name: self._steps.get(name, deque()) for name in names}
        common = os.path.commonpath(names) if len(names) > 1 and all(map(os.path.isabs, names)) else ""
        lines = [self._line(job, name, common) for job, name in zip(jobs, names, strict=True)]
        for _, _, cells in sorted(lines, key=lambda line: line[:2], reverse=True):
            table.add_row(*cells)
        return table

    def _line(self, job: dict[str, Any], name: str, common: str) -> tuple[bool, int, list[str]]:
        """Returns what lines are sorted by, and the cells of one."""
        step = _step_of(job)
        newest = max(job["memory_steps"], default=None)
        cells = [
            str(Path(name).relative_to(common)) if common not in ("", "/") else name,
            str(len(job["ranks"]) or len(job["trainers"]) or "-"),
            _number(step),
            self._speed(name, step),
            *map(_number, (newest, job["node_safe_step"], job["durable_step"])),
            _drain(job["drain"] or {}),
            _does(job),
        ]
        return job["problem"] is not None, -1 if step is None else step, cells

    def _speed(self, name: str, step: int | None) -> str:
        if step is None:
            return "-"
        now, seen = self._clock(), self._steps[name]
        if seen and step < seen[-1][1]:  # a restart has gone back
            seen.clear()
        seen.append((now, step))
        while len(seen) > 2 and now - seen[1][0] >= _SPAN:
            seen.popleft()
        passed = now - seen[0][0]
        return f"{(step - seen[0][1]) / passed:.2f}" if passed > 0 else "-"


def _step_of(job: dict[str, Any]) -> int | None:
    """Returns the newest step that all ranks have completed, as far as anybody tells."""
    pages: list[int] = [
        page["step"] for page in job["ranks"].values() if page["step"] is not None and page["step"] >= 0
    ]
    known: list[int] = job["memory_steps"] or ([] if job["durable_step"] is None else [job["durable_step"]])
    return min(pages) if pages else max(known, default=None)


def _number(step: int | None) -> str:
    return "-" if step is None else str(step)


def _drain(drain: dict[str, Any]) -> str:
    if drain.get("step") is None:
        return "-"
    return f"{100 * drain['done'] // max(drain['total'], 1)} %"


def _does(job: dict[str, Any]) -> str:
    """Returns what the ranks do, the rarest first; the problem, if there is one, in its place."""
    if job["problem"]:
        return str(job["problem"])
    if not job["ranks"]:
        return "trains" if job["trainers"] else "has ended"
    does = [page["does"] for page in job["ranks"].values()]
    counts = sorted((does.count(what), what) for what in set(does))
    return ", ".join(what if len(counts) == 1 else f"{count} {what}" for count, what in counts)
