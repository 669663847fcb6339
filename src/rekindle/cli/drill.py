"""Rehearses a fault: strikes a running job and measures how it recovers."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any

from rekindle.agent.http import send_request
from rekindle.cli.operations import status_pages
from rekindle.errors import FormatError, NotFoundError, RekindleError
from rekindle.format.fields import loads
from rekindle.format.receipt import read_file
from rekindle.memory.fault import Fault
from rekindle.memory.incident import Incident
from rekindle.memory.incidents import incident_files, read_incident, read_start
from rekindle.memory.job_dir import JobDir
from rekindle.memory.status import DONE, SECURED, STAGES, STARTING, Status, read_status

__all__ = ["FAULTS", "DrillReport", "drill"]

FAULTS = {
    "kill": "SIGKILL to the rank",
    "term": "SIGTERM to the rank",
    "stop": "SIGSTOP to the rank",
    "hang": "the rank does nothing more, before its next update",
    "exception": "the rank raises, before its next update",
    "oom": "the rank takes memory until the kernel kills it; as the kernel's first choice, but others may suffer",
    "agent": "SIGKILL to the node's agent",
}
_POLL = 0.002


@dataclass
class DrillReport:
    """The result of a drill. Times are in seconds since the fault; None for an event that was not seen."""

    fault: str
    rank: int
    step: int
    """Updates that all ranks had completed when the fault struck."""
    noticed: float | None = None
    cause: str = ""
    what: str = ""
    secured: float | None = None
    """Time at which the last rank to secure its state had done so."""
    stages: dict[int, str] = field(default_factory=dict)
    """Stage that each rank reached in securing its state."""
    back: float | None = None
    """Time at which every rank had been started again and had restored its state."""
    resumed: int | None = None
    """The step that the job went on from."""
    again: float | None = None
    """Time at which the first new step was complete."""
    incident: Incident | None = None
    """The job's own record of it, as 'rekindle incidents' shows it; None if the job wrote none."""

    @property
    def lost(self) -> int | None:
        """Number of completed steps that must be computed again."""
        return None if self.resumed is None else max(0, self.step - self.resumed)

    def to_json(self) -> dict[str, Any]:
        incident = None if self.incident is None else self.incident.to_json()
        return {**asdict(self), "lost": self.lost, "incident": incident}


def drill(job: JobDir, fault: str, rank: int | None, timeout: float, tell: Callable[[str], object]) -> DrillReport:
    """Strikes the job, and watches it until the first new step is complete, for at most ``timeout`` seconds.

    ``tell`` is given a line at each event. Raises NotFoundError when no such rank trains inside of ``guard()`` here.
    """
    before = status_pages(job)
    if not before or (rank is not None and rank not in before):
        raise NotFoundError(
            f"{job.path}: no rank{'' if rank is None else f' {rank}'} trains inside of ckpt.guard() here"
        )
    victim = max(before) if rank is None else rank
    report, struck = DrillReport(fault, victim, min(page.step for page in before.values())), read_start(job)
    began = time.monotonic()
    _strike(job, fault, victim, before[victim].pid)
    tell(f"{fault}: {FAULTS[fault]}, rank {victim}, step {report.step}")
    if fault == "agent":
        _watch_agent(job, report, began, began + timeout, tell)
        return report
    tell(
        f"waiting {timeout:.0f} s at most for the job to come back: a launcher, such as 'rekindle run', "
        "has to start it again"
    )
    _Recovery(job, report, began, before, tell).watch(began + timeout)
    if struck is not None:
        report.incident = _record_of(job, struck.start)
    return report


def _record_of(job: JobDir, start: str) -> Incident | None:
    """Returns the record of the incident that ended this start."""
    for path in incident_files(job):
        with suppress(OSError, FormatError):
            incident = read_incident(path)
            if incident.start == start:
                return incident
    return None


def _strike(job: JobDir, fault: str, rank: int, pid: int) -> None:
    numbers = {"kill": signal.SIGKILL, "term": signal.SIGTERM, "stop": signal.SIGSTOP}
    if fault in numbers:
        os.kill(pid, numbers[fault])
    elif fault == "agent":
        os.kill(job.agent() or _no_agent(job), signal.SIGKILL)
    else:
        answer = send_request(job.paths.agent_socket, "POST", f"/drill?rank={rank}&fault={fault}")
        if not answer["told"]:
            raise RekindleError(f"rank {rank} is not connected to its agent, which can't pass it the fault")


def _no_agent(job: JobDir) -> int:
    raise NotFoundError(f"{job.path}: has no agent to kill")


def _watch_agent(job: JobDir, report: DrillReport, began: float, until: float, tell: Callable[[str], object]) -> None:
    """Waits until the job, which goes on without its agent, has a new one."""
    while time.monotonic() < until and report.again is None:
        found = status_pages(job)
        if job.agent() is not None and found and min(page.step for page in found.values()) > report.step:
            report.again = report.back = time.monotonic() - began
            report.resumed = report.step
            tell(f"a new agent serves, and training has gone on, after {report.again:.2f} s")
        time.sleep(_POLL)


class _Recovery:
    """Watches the status pages of a job that was struck, and fills in the report."""

    def __init__(
        self, job: JobDir, report: DrillReport, began: float, before: dict[int, Status], tell: Callable[[str], object]
    ) -> None:
        self._job, self._report, self._began, self._tell = job, report, began, tell
        self._ranks = set(before)
        self._generation = max(page.generation for page in before.values())

    def watch(self, until: float) -> None:
        """Watches until the first new step is complete, or until the time is over."""
        while time.monotonic() < until and self._report.again is None:
            self._look()
            time.sleep(_POLL)

    def _look(self) -> None:
        report = self._report
        if report.noticed is None:
            self._look_for_notice()
        found: dict[int, Status] = {}
        for rank in self._ranks:
            with suppress(OSError, FormatError):
                found[rank] = read_status(self._job.paths.status_page(rank))
        old = [page.step for page in found.values() if page.generation == self._generation]
        if len(old) == len(self._ranks):
            report.step = max(report.step, min(old))
        for rank, page in found.items():
            if page.generation == self._generation:
                if page.stage == SECURED and report.stages.get(rank) != STAGES[SECURED]:
                    report.secured = page.progress / 1e9 - self._began
                    self._tell(f"rank {rank}: step {page.secured} secured after {report.secured:.3f} s")
                report.stages[rank] = STAGES[page.stage]
        new = [page for page in found.values() if page.generation > self._generation and page.phase != STARTING]
        if new and len(new) == len(self._ranks):
            if report.back is None:
                report.back, report.resumed = time.monotonic() - self._began, min(page.step for page in new)
                self._tell(f"all ranks are back at step {report.resumed} after {report.back:.2f} s")
            elif min(page.step for page in new) > (report.resumed or 0) or any(page.phase == DONE for page in new):
                report.again = time.monotonic() - self._began
                self._tell(f"the first new step is complete after {report.again:.2f} s")

    def _look_for_notice(self) -> None:
        with suppress(OSError, ValueError):
            fault = Fault.from_json(loads(read_file(self._job.paths.fault)))
            if fault.noticed > self._began:
                self._report.noticed = fault.noticed - self._began
                self._report.cause, self._report.what = fault.cause, fault.what
                self._tell(f"noticed after {self._report.noticed * 1e3:.1f} ms: {fault.what}")
