"""Keeps the records of a job's incidents in memory, and finds out how a start has ended from what it left there.

The agent carries the records to storage, where they outlive the job and the node (``rekindle.agent.records``).
"""

from __future__ import annotations

import json
import socket
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rekindle.common.process_start import clock_id
from rekindle.errors import BusyError, FormatError
from rekindle.format.fields import check_integer, check_seconds, check_texts, loads
from rekindle.format.lineage import check_id
from rekindle.format.receipt import open_file, read_file, write_atomic
from rekindle.memory.fault import Fault
from rekindle.memory.incident import ENDED, FAULT, GONE, LONGEST_LINE, NOTICED, RUNNING, SECURED, Incident
from rekindle.memory.job_dir import JobDir
from rekindle.memory.paths import STATUS_PAGES, matching, rank_of
from rekindle.memory.prices import read_prices
from rekindle.memory.status import DONE, STAGES, Status, read_status

__all__ = ["StartRecord", "describe_end", "describe_stretch", "incident_files", "open_incident", "read_incident"]
__all__ += ["read_incidents", "fault_of", "note_gone", "read_gone", "read_start", "write_incident", "write_start"]

_NOTICED_AT_ONCE = ("exception", "loss", "notice")
"""Causes of faults that the rank itself notices."""
_MOST = 64
"""Records that memory keeps of a job, a file each. Storage keeps more (``rekindle.storage.incidents``)."""


@dataclass(frozen=True)
class StartRecord:
    """Describes the start that trains on this host, or did last. Times are of the host's monotonic clock."""

    start: str
    """Id of its incarnation."""
    generation: int
    clock: str
    """Names the clock that all times are of, as ``clock_id`` does."""
    formed: float
    """Time at which its ranks had met."""
    started: float | None = None
    """Time at which the process of its first rank here was started."""
    restored: float | None = None
    """Time at which its state was restored; None if it wasn't, or not yet."""
    step: int = 0
    """Step that it went on from."""
    count: tuple[str, int] | None = None
    """The launcher's name for the job and the number of its restarts; None if it tells neither."""
    host: str = ""
    """Name of the node among all of the start; empty while that isn't known."""

    @staticmethod
    def from_json(value: Any) -> StartRecord:
        """Reads the record from JSON. Raises FormatError when a field is missing or malformed."""
        try:
            return StartRecord(
                start=check_id(value["start"]),
                generation=check_integer(value["generation"]),
                clock=check_texts([value["clock"]])[0],
                formed=check_seconds(value["formed"]),
                started=None if value["started"] is None else check_seconds(value["started"]),
                restored=None if value["restored"] is None else check_seconds(value["restored"]),
                step=check_integer(value["step"]),
                count=_count_of(value["count"]),
                host=check_texts([value.get("host", "")])[0],
            )
        except (KeyError, TypeError, ValueError) as error:
            raise FormatError(f"the record of a start is not readable: {error!r}") from error


def _count_of(value: Any) -> tuple[str, int] | None:
    if value is None:
        return None
    run, number = value
    return check_texts([run])[0], check_integer(number)


def read_start(job: JobDir) -> StartRecord | None:
    """Returns the record of the newest start on this host since its boot; None without one, or after a good end."""
    with suppress(OSError, ValueError):
        record = StartRecord.from_json(loads(read_file(job.paths.start)))
        return record if record.clock == clock_id() else None
    return None


def write_start(job: JobDir, record: StartRecord) -> None:
    """Replaces the record of the newest start. Raises OSError when memory is full or gone."""
    write_atomic(job.paths.start, json.dumps(asdict(record)).encode())


# -- what has ended a start -----------------------------------------------------------------------------------------


def note_gone(job: JobDir, at: float, noticed: float) -> None:
    """Notes when the last process of a start had ended, as the agent or the launcher saw it. Never raises.

    ``noticed`` is when its fault was: for an agent that got no processor the next start may have come meanwhile, and
    nothing is noted.
    """
    record = read_start(job)
    if record is not None and record.formed <= noticed:
        with suppress(OSError):
            write_atomic(job.paths.gone, json.dumps([record.start, at]).encode())


def read_gone(job: JobDir, start: str) -> float | None:
    """Returns when the last process of this start had ended; None if nobody saw that."""
    with suppress(OSError, ValueError, TypeError):
        noted, at = loads(read_file(job.paths.gone))
        if noted == start:
            return check_seconds(at)
    return None


def describe_end(job: JobDir) -> Incident | None:
    """Describes how the newest start of the job has ended on this host; None if nothing tells of a fault.

    To be asked before the next start writes over the status pages. A start that wasn't guarded leaves none; without a
    notice of a fault its end is no incident, as it may have ended well without ``close()``.
    """
    record = read_start(job)
    if record is None:
        return None
    pages, fault = _pages(job, record), fault_of(job, record)
    if fault is not None:
        return _from_notice(job, record, fault, pages)
    torn = {rank: page for rank, page in pages.items() if page.phase != DONE}
    if not torn:
        return None
    rank = min(torn, key=lambda rank: torn[rank].progress)
    last = max(page.progress for page in torn.values()) / 1e9
    what = "nobody saw how it ended: the node's agent had ended, too"
    at, step = time.time() - (time.monotonic() - last), min(page.step for page in pages.values())
    return _incident(job, record, at=at, cause="unknown", what=what, rank=rank, step=step, ended=last)


def _from_notice(job: JobDir, record: StartRecord, fault: Fault, pages: dict[int, Status]) -> Incident:
    # A rank notices at once what it raises or is told. A death is noticed within some milliseconds, nobody knows when.
    began = fault.noticed if fault.cause in _NOTICED_AT_ONCE else fault.began
    secured = [page.progress / 1e9 for page in pages.values() if page.stage == STAGES.index(SECURED)]
    gone = read_gone(job, record.start)
    noticed = fault.noticed if gone is None else min(fault.noticed, gone)  # by the launcher, the agent came later
    moments = {FAULT: began, NOTICED: noticed, SECURED: max(secured, default=None), GONE: gone}
    step = min((page.step for page in pages.values()), default=-1)
    ended = fault.noticed if began is None else min(began, fault.noticed)
    found = _incident(
        job, record, at=fault.at, cause=fault.cause, what=fault.what, rank=fault.rank, step=step, ended=ended
    )
    return replace(found, moments={name: at for name, at in moments.items() if at is not None})


def _incident(
    job: JobDir, record: StartRecord, *, at: float, cause: str, what: str, rank: int, step: int, ended: float
) -> Incident:
    trained_since = record.formed if record.restored is None else record.restored
    prices = read_prices(job, record.start)
    return Incident(
        start=record.start,
        generation=record.generation,
        host=record.host or socket.gethostname(),
        at=at,
        cause=cause,
        what=what,
        rank=rank,
        step=step,
        began_at=record.step,
        seconds=None if record.started is None else max(0.0, ended - record.started),
        trained=max(0.0, ended - trained_since),
        prices={} if prices is None else prices.to_json(),
    )


def _pages(job: JobDir, record: StartRecord) -> dict[int, Status]:
    """Returns the status pages that ranks of this start have left: its generation may be an earlier one's, too."""
    found = {}
    for path in matching(job.path, STATUS_PAGES):
        with suppress(OSError, FormatError):
            page = read_status(path)
            if page.generation == record.generation and page.progress / 1e9 >= record.formed:
                found[rank_of(path)] = page
    return found


def fault_of(job: JobDir, record: StartRecord) -> Fault | None:
    """Returns the fault that was noticed in this start; None without one."""
    with suppress(OSError, ValueError):
        fault = Fault.from_json(loads(read_file(job.paths.fault)))
        if fault.generation == record.generation and fault.noticed >= record.formed:
            return fault
    return None


def describe_stretch(job: JobDir, cause: str, step: int = -1) -> Incident | None:
    """Describes the start that trains, or has just ended well, as a stretch up to now. ``cause``: RUNNING or ENDED.

    ``step`` is the newest one that is known to be complete, where the ranks' pages don't tell of a newer one.
    """
    record = read_start(job)
    if record is None:
        return None
    pages = _pages(job, record)
    step = max(step, min((page.step for page in pages.values()), default=-1))
    now, words = time.monotonic(), {RUNNING: "the job trains", ENDED: "the job has ended well"}
    trained_until = max((page.progress / 1e9 for page in pages.values()), default=now)
    found = _incident(
        job, record, at=time.time(), cause=cause, what=words[cause], rank=-1, step=step, ended=trained_until
    )
    seconds = None if record.started is None else now - record.started
    return replace(found, seconds=seconds, moments={NOTICED: now})


# -- the records ----------------------------------------------------------------------------------------------------


def incident_files(job: JobDir) -> list[Path]:
    """Returns the files of the records that memory has, oldest start first."""
    return sorted(matching(job.paths.incidents, "[0-9]*.jsonl"))


def read_incident(path: Path) -> Incident:
    """Reads one record. Raises OSError, or FormatError for what is none."""
    with open(open_file(path), "rb") as file:
        return Incident.decode(file.read(LONGEST_LINE + 1))


def read_incidents(job: JobDir) -> list[Incident]:
    """Returns all records that memory has and that can be read."""
    found = []
    for path in incident_files(job):
        with suppress(OSError, FormatError):
            found.append(read_incident(path))
    return found


def write_incident(job: JobDir, incident: Incident) -> None:
    """Writes a record, over an earlier one of the same start. Raises OSError when memory is full or gone."""
    directory = job.paths.incidents
    directory.mkdir(mode=0o700, exist_ok=True)
    write_atomic(directory / incident.name, incident.encode())
    for surplus in incident_files(job)[:-_MOST]:
        surplus.unlink(missing_ok=True)


def open_incident(job: JobDir) -> None:
    """Writes down how the newest start has ended, if by a fault, and if nobody has. For the agent. Never raises.

    The next start may never come. One that comes writes over the record, and knows more.
    """
    with suppress(OSError, BusyError), job.locked():  # no trainer arrives meanwhile
        incident = None if job.trainers() else describe_end(job)
        if incident is not None and not (job.paths.incidents / incident.name).exists():
            write_incident(job, incident)
