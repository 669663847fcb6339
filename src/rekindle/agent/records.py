"""Carries the records of incidents from memory to storage, where they outlive the job."""

from __future__ import annotations

import logging
import time
from contextlib import suppress
from pathlib import Path

from rekindle.common.os_errors import describe_error
from rekindle.errors import FormatError, RekindleError
from rekindle.memory.incident import Incident
from rekindle.memory.incidents import incident_files, read_incident
from rekindle.memory.job_dir import JobDir
from rekindle.storage.incidents import store_incident
from rekindle.storage.open import open_store

__all__ = ["RecordCarrier"]

log = logging.getLogger("rekindle.agent")

_AGAIN = 30.0
"""Seconds between attempts while storage refuses a record, or has no checkpoint yet."""
_SETTLES = 5.0
"""Seconds after which a record is carried as it is, though the job is not back: soon there may be more to it."""
_LOOK = 0.5
"""Seconds between looks while a record is about to be carried."""


class RecordCarrier:
    """Carries the records of one job's incidents. Used by one thread of one process per node, as the drain is.

    A record costs training nothing: one that storage refuses is one line in the log, and is tried again later.
    """

    def __init__(self, job: JobDir) -> None:
        self._job = job
        self._carried: dict[str, Incident] = {}
        """By name: the records as storage has them. This process's successor carries all of them once more."""
        self._look_at = 0.0
        self._seen = -1
        """Time of change of the directory when storage had all that is in it."""
        self._refused = False

    def wanting(self) -> bool:
        """True if there may be a record to carry now. Costs a look at one directory."""
        return time.monotonic() >= self._look_at and self._changed() not in (0, self._seen)

    def _changed(self) -> int:
        with suppress(OSError):
            return self._job.paths.incidents.stat().st_mtime_ns
        return 0

    def carry(self, *, last: bool = False) -> bool:
        """Carries the records that storage lacks. Returns True if it has all of them now. Never raises.

        With ``last`` nobody tries again: the memory is about to be given back.
        """
        changed, self._look_at = self._changed(), time.monotonic() + _LOOK
        try:
            settled = self._carry(last=last)
        except (OSError, RekindleError) as error:
            if not self._refused:
                why = describe_error(error) if isinstance(error, OSError) else str(error)
                log.warning("storage refused the record of an incident; memory has it until the job ends: %s", why)
            self._refused, self._look_at = True, time.monotonic() + _AGAIN
            return False
        # The kernel's times are some milliseconds coarse: a change as young as that may have been followed by another.
        if settled and time.time() - changed / 1e9 > _LOOK:
            self._seen = changed
        return settled

    def _carry(self, *, last: bool) -> bool:
        """Returns True if storage has all records now."""
        news, settled = self._news(last=last)
        info = self._job.read_job() if news else None
        if info is None:
            return settled and not news
        store = open_store(info.root)
        if not store.published():  # a root that isn't mounted, was deleted, or has not got its first checkpoint
            self._look_at = time.monotonic() + _AGAIN
            return False
        for name, incident in news.items():
            store_incident(store, incident)
            self._carried[name] = incident
        self._refused = False
        return settled

    def _news(self, *, last: bool) -> tuple[dict[str, Incident], bool]:
        """Returns the records that storage lacks, by name, and False if some are left out because more is to come."""
        news, settled = {}, True
        for path in incident_files(self._job):
            incident = self._read(path)
            if incident is None or self._carried.get(path.name) == incident:
                continue
            if last or not incident.is_fault or incident.outage is not None or _age(path) > _SETTLES:
                news[path.name] = incident
            else:
                settled = False
        return news, settled

    def _read(self, path: Path) -> Incident | None:
        try:
            return read_incident(path)
        except FileNotFoundError:
            return None
        except FormatError as error:
            log.warning("%s %s: it is removed", path, error)
            path.unlink(missing_ok=True)
            return None


def _age(path: Path) -> float:
    with suppress(OSError):
        return time.time() - path.stat().st_mtime
    return 0.0
