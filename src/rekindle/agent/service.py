"""Runs a job's agent: takes the lock, drains, answers requests, and ends when the job needs it no more.

``python -m rekindle.agent`` and ``rekindle agent`` both call ``run``.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import logging
import os
import signal
import sys
import time
from collections.abc import Coroutine
from typing import Any

from rekindle.agent.drain import TICK, Drainer
from rekindle.agent.file_service import FilesAgent
from rekindle.agent.mesh_loader import serve_mesh
from rekindle.agent.monitor import RankMonitor
from rekindle.agent.others import Others
from rekindle.agent.quiet import Quiet
from rekindle.agent.serving import IDLE, Service
from rekindle.common.os_errors import explain
from rekindle.errors import FormatError, RekindleError
from rekindle.memory.compile_dir import CompileDir
from rekindle.memory.elsewhere import Elsewhere
from rekindle.memory.files_dir import FILES, FilesDir
from rekindle.memory.incidents import open_incident, read_start
from rekindle.memory.job import JobInfo
from rekindle.memory.job_dir import JobDir
from rekindle.memory.lock import Lock
from rekindle.memory.paths import LOCAL_STATE_PLANS, matching
from rekindle.memory.rebuild import rebuild_dead_ranks

__all__ = ["run", "describe_orphan"]

log = logging.getLogger("rekindle.agent")

_LAST_DRAIN = 600.0
"""Seconds that an agent's successor gives it for the drain in hand."""
_NO_JOB = 60.0
"""Seconds that an agent waits for a trainer to write down the job."""
_SECURED_WITHIN = 5.0
"""Seconds after the last trainer's end in which ranks of other nodes may still secure replicas of what it held."""


class Agent(Service):
    """One job's agent on this node."""

    drainer: Drainer

    def __init__(self, job: JobDir, lock: Lock) -> None:
        super().__init__(job, lock, Drainer(job, self._write_status, lambda: self.monitor.others.lost_ranks()))
        self.monitor = RankMonitor(job, self._urgent)
        self._alone_since = time.monotonic()
        self._quiet = Quiet(job, lambda: (len(self.monitor.ranks), self.monitor.fault))
        self._idle = False
        """True once the last trainer has ended and the dead ranks' snapshots have been rebuilt."""
        self._elsewhere: tuple[Others, Elsewhere] | None = None
        """The other nodes, and their memory for all looks at it until training goes on: a silent one is asked once."""
        self._told = False
        """True once the record of the newest start's end is written, should a fault have ended it."""

    def _info(self) -> JobInfo | None:
        """Reads the job's description; None while there is none, and when it can't be read, which the drain reports."""
        with contextlib.suppress(FormatError):
            return self.job.read_job()
        return None

    def status(self) -> dict[str, Any]:
        info = self._info()
        return {
            "pid": os.getpid(),
            "root": info.root if info else None,
            "stopping": self.stopping,
            "trainers": self.job.trainers(),
            "memory_bytes": self.job.held_bytes(),
            "fault": self.monitor.fault.what if self.monitor.fault is not None else None,
            "nodes": self.monitor.others.status(),
            **self.monitor.others.safety(),
            **self._progress(),
        }

    def _progress(self) -> dict[str, Any]:
        progress = super()._progress()
        progress["error"] = describe_orphan(self.job) or progress["error"]
        return progress

    def _stays(self) -> str:
        return "the step stays in memory"

    def _urgent(self, on: bool) -> None:
        self.drainer.hurry(on=on or self.quitting)

    def _watches(self) -> list[Coroutine[Any, Any, None]]:
        return [self.monitor.serve(), serve_mesh(self.job, self.monitor, self._durable, self._stop_with_others)]

    def _stop_with_others(self, only_look: bool) -> dict[str, Any]:
        """Ends the job when another node's ``rekindle stop`` asks, unless it is trained here. Returns the answer.

        With ``only_look`` it answers, and does nothing. For any thread.
        """
        trainers = sorted(set(self.job.trainers().values()) - {os.getpid()})  # this agent holds those of dead ranks
        if not trainers and not only_look:
            self._stop()
        progress = self._progress()
        return {"trainers": trainers, "why": progress["error"] or progress["waits"]}

    def _durable(self) -> int:
        durable = self.drainer.progress.durable
        return -1 if durable is None else durable

    def _send_to(self, rank: int, message: dict[str, Any]) -> bool:
        return self.monitor.send_to(rank, message)

    def _rests(self) -> bool:
        return self._quiet.lasts

    def _work(self) -> bool:
        self._quiet.begin_round()
        alone = not self.job.trainers()
        if alone and (not self._idle or self._others_may_secure()):
            try:
                rebuild_dead_ranks(self.job, self._look_elsewhere())
            except OSError as error:  # no open files are left, for one: the next round tries again
                self.drainer.progress.error = explain(error)
                return False
        self._idle = alone
        self.pause = IDLE if alone else TICK
        if not alone:
            self._told, self._elsewhere = False, None
        elif not self._told and (self.monitor.has_seen_all or read_start(self.job) is None):
            # A lock is free a moment before the death is noticed. After a good end there is none to be noticed: a rank
            # that calls close() inside of guard() stays connected, and waits for this agent.
            open_incident(self.job)
            self._told = True
        busy = self.drainer.tick()
        self._write_status()
        if not (alone or busy):
            with contextlib.suppress(OSError, FormatError):  # the drain reports it
                due_at = self.drainer.next_due()
                if due_at is not None:
                    self._quiet.rest(due_at)
        return busy

    def _look_elsewhere(self) -> Elsewhere:
        """Returns the memory of the other nodes, to be looked at anew."""
        others = self.monitor.others
        if self._elsewhere is None or self._elsewhere[0] is not others:  # a new agent may have joined them just now
            self._elsewhere = others, others.elsewhere()
        self._elsewhere[1].look_again()
        return self._elsewhere[1]

    def _others_may_secure(self) -> bool:
        """True for a while after a fault if there are other nodes, whose ranks may end later than those of this one."""
        soon = bool(self.monitor.others.name) and time.monotonic() < self._alone_since + _SECURED_WITHIN
        return soon and bool(matching(self.job.path, LOCAL_STATE_PLANS))  # there are none after a good end

    def _done(self) -> bool:
        now = time.monotonic()
        if self.job.trainers():
            self._alone_since, self.stopping = now, False
            return False
        alone = now - self._alone_since
        try:
            info = self.job.read_job()
        except (OSError, FormatError):  # the drain reports it
            return False
        try:
            if info is None:
                return alone > _NO_JOB or not self.job.path.exists()
            empty = next(self.job.snapshots.shard_ids(), None) is None
            if not (empty or self.stopping or alone > info.idle_timeout) or self.monitor.reporting or not self._told:
                return False
            if self._others_may_secure():
                return False
            if self.drainer.pending() is not None:
                return False
            self.drainer.finish()
            if not self.job.remove():
                return False
            CompileDir.remove_abandoned(self.job.path.parent)
            return True
        except (OSError, RekindleError) as error:
            self.drainer.progress.error = explain(error)
            return False


def describe_orphan(job: JobDir) -> str | None:
    """Describes snapshots that no agent can drain, as the job's description was removed; None if there are none."""
    if os.path.exists(job.path / "job.json"):
        return None
    newest = max((stamp.step for stamp, _ in job.snapshots.shard_ids()), default=None)
    if newest is None:
        return None
    return (
        f"step {newest} stays in memory and can't be drained, because {job.path / 'job.json'} is gone, which names its "
        "root. Start the job again on this node to go on from there, or give the step up with 'rekindle stop --discard "
        "ROOT'"
    )


def _trim() -> None:
    """Gives back the memory that imports left over: some megabytes, of the few that an agent may hold."""
    gc.collect()
    if sys.platform.startswith("linux"):
        getattr(ctypes.CDLL(None), "malloc_trim", lambda pad: None)(0)


def _acquire(lock: Lock, after: int | None) -> bool:
    """Takes the lock of agents. Ends agent ``after`` itself, so that no third one, which starts then, comes first."""
    until = time.monotonic() + _LAST_DRAIN
    if after is not None and Lock.holder(lock.path) == after:
        with contextlib.suppress(ProcessLookupError):
            os.kill(after, signal.SIGTERM)
    try:
        while not lock.acquire(1.0):
            if after is None or Lock.holder(lock.path) not in (None, after) or time.monotonic() > until:
                return False
    except FileNotFoundError:  # the memory was given back meanwhile
        return False
    return True


def run(job: JobDir, after: int | None = None) -> int:
    """Serves one job until it is over. Returns the exit code: 0 also when another agent already serves it.

    Tells agent ``after`` to end, and waits for that.
    """
    job.check()
    lock = Lock(job.paths.agent_lock)
    if not job.path.is_dir():
        return 0  # the job ended before its agent had come up
    if not _acquire(lock, after):
        log.info("this agent ends, as another one serves %s", job.path)
        return 0
    _trim()
    agent = FilesAgent(FilesDir(job.path), lock) if job.path.name == FILES else Agent(job, lock)
    asyncio.run(agent.run())
    log.info("agent %d ends", os.getpid())
    return 0
