"""Times a recovery: completes the record of the incident that ended the start before, on one rank of each host.

Each moment is written down when it comes: a start that ends before its first step leaves the moments until then.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

from rekindle.common.os_errors import describe_error
from rekindle.common.process_start import clock_id, process_started, was_warm
from rekindle.memory.incident import ENDED, FIRST_STEP, FORMED, GONE, NOTICED, RESTORED, STARTED, Incident
from rekindle.memory.incidents import (
    StartRecord,
    describe_end,
    describe_stretch,
    incident_files,
    read_gone,
    read_start,
    write_incident,
    write_start,
)
from rekindle.memory.job_dir import JobDir
from rekindle.session.session import Session

__all__ = ["RecoveryClock"]

log = logging.getLogger("rekindle")

_COUNT, _RUN = "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_RUN_ID"


class RecoveryClock:
    """The clock of one start. Its methods never raise: a record that can't be written costs one line in the log."""

    def __init__(self, session: Session) -> None:
        """To be made when the ranks have met, and before any of them is guarded: that replaces the status pages."""
        self._session = session
        self._job: JobDir | None = session.job if session.is_first_on_node else None
        self._incident: Incident | None = None
        """The incident that this start recovers from; None without one, and once it has recovered."""
        self._record: StartRecord | None = None
        self._try(self._begin)

    def _try(self, work: Callable[[JobDir], object]) -> None:
        if self._job is None:
            return
        try:
            work(self._job)
        except OSError as error:
            log.warning(
                "%s: this start's recovery is not recorded any further: %s", self._job.path, describe_error(error)
            )
            self._job = None

    def _begin(self, job: JobDir) -> None:
        session = self._session
        before, started, incarnation = read_start(job), process_started(), session.agreed.incarnation
        incident = describe_end(job)
        count = _restart_count()
        self._record = StartRecord(
            incarnation.id, incarnation.generation, clock_id(), session.joined, started, count=count
        )
        if incident is not None and before is not None:
            known = {FORMED: session.joined} | ({} if started is None else {STARTED: started})
            starts = _starts_between(before.count, count)
            moments = {**incident.moments, **known}
            if started is not None and NOTICED in moments:  # a launcher may be faster than an agent without a processor
                moments[NOTICED] = min(moments[NOTICED], started)
            self._incident = replace(incident, moments=moments, warm=was_warm(), starts=starts)
            write_incident(job, self._incident)
        write_start(job, self._record)  # last: what it replaces is part of what was just written down

    def restored(self, step: int, place: str) -> None:
        """Note that the state is that of ``step``, out of the store ``place``; empty when it begins anew."""
        now = time.monotonic()
        self._try(lambda job: self._went_on(job, now, step, place))

    def went_on_from(self, step: int) -> None:
        """Note that the state is that of ``step``, which others have restored before the ranks met: nobody timed it."""
        self._try(lambda job: self._went_on(job, None, step, ""))

    def _went_on(self, job: JobDir, restored: float | None, step: int, place: str) -> None:
        assert self._record is not None
        nodes = self._session.nodes  # known by now; a fault before has the host's name, which others may have too
        self._record = replace(self._record, restored=restored, step=step, host=nodes.here.name if nodes else "")
        write_start(job, self._record)
        if self._incident is not None:
            moments = self._incident.moments | ({} if restored is None else {RESTORED: restored})
            self._incident = replace(self._incident, moments=moments, restored_step=step, place=place)
            if self._incident.lost and self._session.rank == 0:
                log.info(
                    "step %d was completed before the fault, and step %d is restored: %d completed step(s) are lost, "
                    "and computed again",
                    *(self._incident.step, step, self._incident.lost),
                )
            write_incident(job, self._incident)

    def stepped(self, n: int) -> None:
        """Note that step ``n`` is complete. The first new one ends the recovery; later ones cost nothing."""
        if self._incident is not None and self._record is not None and n > self._record.step:
            now = time.monotonic()
            self._try(lambda job: self._stepped(job, now))
            self._incident = None

    def _stepped(self, job: JobDir, now: float) -> None:
        assert self._incident is not None
        moments = {**self._incident.moments, FIRST_STEP: now}
        if GONE not in moments:  # an agent that got no processor has seen it late
            gone = read_gone(job, self._incident.start)
            moments |= {} if gone is None else {GONE: gone}
        write_incident(job, replace(self._incident, moments=moments))

    def ended(self, step: int) -> None:
        """Note that the job has ended well after ``step``. After incidents the stretch up to now is recorded, too."""
        self._try(lambda job: self._ended(job, step))

    def _ended(self, job: JobDir, step: int) -> None:
        last = describe_stretch(job, ENDED, step) if incident_files(job) else None
        if last is not None:
            write_incident(job, last)
        job.paths.start.unlink(missing_ok=True)


def _restart_count() -> tuple[str, int] | None:
    with suppress(KeyError, ValueError):
        return os.environ[_RUN], int(os.environ[_COUNT])
    return None


def _starts_between(before: tuple[str, int] | None, now: tuple[str, int] | None) -> int | None:
    """Returns the number of starts since the one before, by the launcher's own count of its restarts."""
    if before is None or now is None or before[0] != now[0] or now[1] <= before[1]:
        return None
    return now[1] - before[1]
