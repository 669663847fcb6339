"""Reports which checkpoints are safe where, when a run ends without waiting for storage."""

from __future__ import annotations

import atexit
import logging
from dataclasses import dataclass
from functools import partial
from weakref import WeakSet

from rekindle.common.os_errors import describe_error
from rekindle.common.timeouts import with_timeout
from rekindle.memory.job_dir import JobDir
from rekindle.save.saver import Saver
from rekindle.session.session import Session
from rekindle.storage.catalog import list_checkpoints

__all__ = ["ExitReport"]

log = logging.getLogger("rekindle")

_LOOK = 3.0
"""Seconds that storage gets to say what it has: whoever is leaving must not be kept."""


def _describe(session: Session, reached: int, *, writing: bool) -> str:
    """Returns a line on the newest checkpoint in memory and the newest on storage, and what becomes of them.

    ``reached`` is the newest completed step, ``writing`` is True if this process is writing to storage.
    """
    job, store, local_ranks = session.job, session.store, session.local_ranks
    unknown = ""
    try:
        found = with_timeout(_LOOK, store.root, partial(list_checkpoints, job, store, local_ranks))
    except (OSError, RuntimeError) as error:  # from Python 3.12 on an interpreter that is about to end has no threads
        found, unknown = list_checkpoints(job, None, local_ranks), f"storage can't be read now: {describe_error(error)}"
    newest = max((one.step for one in found), default=None)
    durable = max((one.step for one in found if one.durable), default=None)
    parts = [] if newest is None or newest == durable else [_describe_memory(newest, job)]
    if durable is not None:
        parts.append(f"step {durable} is on storage")
    elif writing:
        parts.append("this process is still writing to storage, and waits for that at its end")
    else:
        parts.append(unknown or "nothing is on storage")
    if newest is not None and reached > newest:
        parts.append(f"what came after step {newest} is not saved")
    return "; ".join(parts)


def _describe_memory(step: int, job: JobDir | None) -> str:
    agent = job is not None and job.agent() is not None
    then = "the agent carries it to storage" if agent else "the next start on this node finds it there"
    return f"step {step} is in this node's memory, and {then}"


@dataclass(eq=False)
class ExitReport:
    """Reports once, when a run is left by an exception, or when its process ends without ``close()``.

    At the process's end one rank of each node reports, if it has made a step. Nobody does once ``given`` is set, or
    this object is gone.
    """

    saver: Saver
    session: Session
    given: bool = False

    def __post_init__(self) -> None:
        atexit.unregister(_at_exit)  # once is enough
        atexit.register(_at_exit)
        _open.add(self)

    def give(self, error: BaseException) -> None:
        """Report on a run that ``error`` ends."""
        log.warning("left by %s, without waiting for storage: %s", type(error).__name__, self._describe())

    def give_at_exit(self) -> None:
        """Report at the end of the process, if that is still to be done."""
        saver = self.saver
        if not self.given and not saver.forked and self.session.is_first_on_node and saver.reached > saver.restored:
            saver.finish_quietly(0.0)
            log.warning("ended without close(): %s", self._describe())

    def _describe(self) -> str:
        saver = self.saver
        return _describe(self.session, saver.reached, writing=saver.direct.writing)


_open: WeakSet[ExitReport] = WeakSet()


def _at_exit() -> None:
    for report in list(_open):
        report.give_at_exit()
