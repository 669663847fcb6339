"""Describes jobs for the page, as JSON: how they are now, and their history. Asks what the other commands ask."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from rekindle.cli.alarms import KINDS
from rekindle.cli.goodput import add_up
from rekindle.cli.incidents import collect_incidents
from rekindle.cli.ls import Row, find_rows
from rekindle.cli.operations import job_status
from rekindle.cli.page.checkpoints import line_up, measure
from rekindle.cli.page.sampling import Samples, steps_per_second
from rekindle.cli.page.timeline import draw, thin_out
from rekindle.cli.terminal import ANSWERS_WITHIN
from rekindle.common.os_errors import explain
from rekindle.common.timeouts import with_timeout
from rekindle.errors import NotFoundError, RekindleError
from rekindle.format.names import Root
from rekindle.memory.costs import BOUNDS, Costs, Histogram, rank_costs
from rekindle.memory.incident import Incident
from rekindle.memory.job_dir import JobDir
from rekindle.memory.notes import durable_at
from rekindle.storage.catalog import STORAGE
from rekindle.storage.listing import job_info, jobs_in_memory
from rekindle.storage.open import open_store
from rekindle.storage.verdicts import load_verdicts

__all__ = ["Jobs", "describe_history", "describe_now", "overview"]

_DAMAGED = "Run 'rekindle verify ROOT' to see what is wrong. A restore takes the newest step that is sound."
_UNREADABLE = "Start the job again, which writes its records anew. Its checkpoints on storage are not touched."


class Jobs:
    """The jobs that the page shows: those of some roots, or all that have memory on this node."""

    def __init__(self, roots: Sequence[Root], base: Path) -> None:
        self.base = base
        self._roots = {JobDir.of(root, base).path.name: root for root in roots}
        self._chosen = bool(roots)

    def directories(self) -> list[JobDir]:
        """Lists the jobs by their directories in memory, which a job that has ended may not have."""
        if self._chosen:
            return [JobDir(self.base / name) for name in self._roots]
        return jobs_in_memory(self.base)

    def find(self, name: str) -> JobDir | None:
        """Returns the job of this name; None if the page doesn't show it."""
        return next((job for job in self.directories() if job.path.name == name), None)

    def root_of(self, job: JobDir) -> Root | None:
        """Returns a job's root; None where its description is gone."""
        root = self._roots.get(job.path.name)
        if root is None and (info := job_info(job)) is not None:
            root = self._roots[job.path.name] = Path(info.root) if info.root.startswith(os.sep) else info.root
        return root


def overview(jobs: Jobs, job: JobDir, samples: Samples) -> dict[str, Any]:
    """Describes a job in a few numbers, from files in memory alone; one that can't be read by the error."""
    try:
        status = _status(jobs, job, ask=False)
        return {**_summary(jobs, job, status, samples), "memory_bytes": status.get("memory_bytes", 0)}
    except (RekindleError, OSError) as error:
        alarm = {"kind": "unread", "what": _words(error), "do": _UNREADABLE}
        numbers = ("step", "steps_per_second", "newest_in_memory", "durable_step", "durable_at", "memory_bytes")
        unknown = dict.fromkeys(numbers)
        return {"id": job.path.name, "root": str(job.path), "state": "unknown", "alarms": [alarm], **unknown}


def describe_now(jobs: Jobs, job: JobDir, samples: Samples) -> dict[str, Any]:
    """Describes a job as it is now, from memory, its agent and its processes. Asks storage nothing."""
    status = _status(jobs, job, ask=True)
    costs = rank_costs(job)
    return {
        **_summary(jobs, job, status, samples),
        "status": status,
        "room": _room(job),
        "steps_seen": thin_out(samples.steps),
        "drains_seen": list(samples.drains),
        "distributions": _distributions(costs),
        "saving": _saving(costs),
    }


def _status(jobs: Jobs, job: JobDir, *, ask: bool) -> dict[str, Any]:
    """Returns the job's status; that of a job without memory here is empty but for its root."""
    if job.path.is_dir():
        with suppress(FileNotFoundError):  # the memory is given back just now
            return job_status(job, ask=ask)
    root = jobs.root_of(job)
    return {"root": None if root is None else str(root), "directory": None}


def _summary(jobs: Jobs, job: JobDir, status: dict[str, Any], samples: Samples) -> dict[str, Any]:
    info = job_info(job)
    steps = [page["step"] for page in status.get("ranks", {}).values() if page["step"] >= 0]
    seen = samples.steps[-1][1] if samples.steps else None
    held = status.get("memory_steps") or [None]
    trains = bool(status.get("trainers"))
    return {
        "id": job.path.name,
        "root": status["root"] or str(jobs.root_of(job) or job.path),
        "state": _state(status),
        "world": None if info is None else info.world,
        "here": len(status.get("trainers") or ()),
        "step": min(steps, default=seen),
        "steps_per_second": steps_per_second(samples.steps) if trains else None,
        "newest_in_memory": held[0],
        "durable_step": status.get("durable_step"),
        "durable_at": durable_at(job.path),
        "node_safe_step": status.get("node_safe_step"),
        "alarms": [{**alarm, "do": KINDS[alarm["kind"]]} for alarm in status.get("alarms", ())],
    }


def _state(status: dict[str, Any]) -> str:
    """Returns ``training``, ``starting`` or ``failing``; ``ended``, or ``away`` with nothing in this node's memory."""
    if status["directory"] is None:
        return "away"
    if not status["trainers"]:
        return "ended"
    phases = {page["phase"] for page in status["ranks"].values()}
    if phases & {"securing", "secured", "failed"}:
        return "failing"
    return "starting" if "starting" in phases else "training"


def _room(job: JobDir) -> dict[str, int] | None:
    with suppress(OSError):
        return {"total": job.total_bytes(), "free": job.free_bytes()}
    return None


def _distributions(costs: dict[int, Costs]) -> dict[str, Any] | None:
    if not costs:
        return None
    return {
        "bounds": BOUNDS,
        "ranks": len(costs),
        "stalls": _merge([one.stalls for one in costs.values()]),
        "step_seconds": _merge([one.step_seconds for one in costs.values()]),
    }


def _merge(histograms: list[Histogram]) -> dict[str, Any]:
    counts = [sum(bucket) for bucket in zip(*(one.counts for one in histograms), strict=True)]
    count, total = sum(counts), sum(one.total for one in histograms)
    return {"counts": counts, "count": count, "mean": total / count if count else None}


def _saving(costs: dict[int, Costs]) -> dict[str, int]:
    names = ("saves", "failed", "left_out", "direct", "memory_lost", "agent_lost")
    return {name: sum(getattr(one, name) for one in costs.values()) for name in names}


def describe_history(jobs: Jobs, job: JobDir) -> dict[str, Any]:
    """Describes the job's checkpoints and incidents, from memory and storage. Bounded, also where storage hangs."""
    root = jobs.root_of(job)
    if root is None:
        return _without("the job's description is gone, which names its root")
    troubles: list[str] = []
    rows: list[Row] = []
    records: list[Incident] = []
    problems: list[str] = []
    others = None
    try:
        rows, others, trouble = find_rows(root, jobs.base)
        troubles += [_words(trouble)] if trouble is not None else []
    except NotFoundError as error:
        troubles += [str(error)] if not job.path.is_dir() else []  # a young job has none yet
    except (RekindleError, OSError) as error:
        troubles.append(_words(error))
    try:
        records, problems, trouble = collect_incidents(root, jobs.base)
        troubles += [_words(trouble)] if trouble is not None else []
    except NotFoundError:
        pass  # as above
    except (RekindleError, OSError) as error:
        troubles.append(_words(error))
    verdicts = {}
    if any(row.entry.copy.place == STORAGE for row in rows):
        with suppress(OSError):
            verdicts = with_timeout(ANSWERS_WITHIN, root, lambda: load_verdicts(open_store(root)))
    lines = line_up(rows, verdicts)
    totals = add_up(records)
    return {
        "checkpoints": lines,
        "newest_stored": _newest_stored(lines),
        "used": measure(lines),
        "timeline": draw(lines, records),
        "incidents": [record.to_json() for record in records if record.is_fault],
        "totals": totals.to_json(),
        "alarms": _alarms(lines, troubles),
        "problems": problems + ([] if others is None else [f"{name}: {why}" for name, why in others.silent.items()]),
        "at": time.time(),
    }


def _newest_stored(lines: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Returns the step of the newest checkpoint on storage that stands, and its time."""
    for line in lines:
        if line[STORAGE] is not None and line[STORAGE]["condition"] == "complete":
            return {"step": line["step"], "at": line[STORAGE]["saved_at"]}
    return None


def _without(why: str) -> dict[str, Any]:
    return {
        **{"checkpoints": [], "newest_stored": None, "used": measure([]), "timeline": draw([], []), "incidents": []},
        **{"totals": add_up([]).to_json(), "alarms": _alarms([], [why]), "problems": [], "at": time.time()},
    }


def _alarms(lines: list[dict[str, Any]], troubles: list[str]) -> list[dict[str, str]]:
    found = [{"kind": "unread", "what": why, "do": KINDS["storage"]} for why in dict.fromkeys(troubles)]
    damaged = [
        str(line["step"])
        for line in lines
        if line[STORAGE] is not None and (line[STORAGE]["condition"] == "damaged" or line[STORAGE]["sound"] is False)
    ]
    if damaged:
        what = f"damaged on storage: step {', '.join(damaged[:10])}{', ...' if len(damaged) > 10 else ''}"
        found.append({"kind": "damaged", "what": what, "do": _DAMAGED})
    return found


def _words(error: Exception) -> str:
    return explain(error) if isinstance(error, OSError) else str(error)
