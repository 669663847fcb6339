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
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import Any

from rekindle.agent.drain import TICK, Drainer
from rekindle.agent.listener import answer_requests, listen
from rekindle.agent.monitor import RankMonitor
from rekindle.common.os_errors import explain
from rekindle.common.priority import lower_priority
from rekindle.errors import FormatError, RekindleError
from rekindle.memory.compile_dir import CompileDir
from rekindle.memory.incidents import open_incident, read_start
from rekindle.memory.job import JobInfo
from rekindle.memory.job_dir import JobDir
from rekindle.memory.lock import Lock
from rekindle.memory.rebuild import rebuild_dead_ranks

__all__ = ["run", "describe_orphan"]

log = logging.getLogger("rekindle.agent")

_IDLE = 0.5
"""Seconds between two checks while there is no trainer and nothing to drain."""
_HANGS_AFTER, _CHECK_EVERY = 10.0, 1.0
"""Seconds without an answer after which storage is reported to hang, and an agent that was told to end gives up the
drain in hand; then the seconds between two checks of that."""
_NO_JOB = 60.0
"""Seconds that an agent waits for a trainer to write down the job."""


class Agent:
    """One job's agent on this node. All that its successor would need is in files."""

    def __init__(self, job: JobDir, lock: Lock) -> None:
        self.job = job
        self.lock = lock
        self.drainer = Drainer(job, self._write_status)
        self.monitor = RankMonitor(job, self._urgent)
        self.stopping = False
        """True once the agent is to end, and to give the memory back, as soon as everything is durable."""
        self.quitting = False
        """True once the agent is to end after the drain in hand. The memory stays."""
        self._alone_since = time.monotonic()
        self._idle = False
        """True once the last trainer has ended and the dead ranks' snapshots have been rebuilt."""
        self._told = False
        """True once the record of the newest start's end is written, should a fault have ended it."""
        self._written: dict[str, Any] = {}
        # The event loop keeps its priority: it must answer, and notice faults, while training has all cores busy.
        self._behind = ThreadPoolExecutor(1, thread_name_prefix="rekindle-drain", initializer=lower_priority)

    def _info(self) -> JobInfo | None:
        """Reads the job's description; None while there is none, and when it can't be read, which the drain reports."""
        with contextlib.suppress(FormatError):
            return self.job.read_job()
        return None

    def status(self) -> dict[str, Any]:
        """Returns the answer to ``GET /status``."""
        info = self._info()
        return {
            "pid": os.getpid(),
            "root": info.root if info else None,
            "stopping": self.stopping,
            "trainers": self.job.trainers(),
            "memory_bytes": self.job.held_bytes(),
            "fault": self.monitor.fault.what if self.monitor.fault is not None else None,
            **self._progress(),
        }

    def _silent(self) -> float:
        """Returns the seconds since storage last answered; 0 while no request waits for it."""
        moved = self.drainer.progress.moved
        return 0.0 if moved is None else time.monotonic() - moved

    def _progress(self) -> dict[str, Any]:
        """Returns the drain's progress. Adds an error when storage hangs, which the waiting drain can't report."""
        progress = asdict(self.drainer.progress)
        del progress["moved"]
        silent = self._silent()
        if silent > _HANGS_AFTER:
            progress["error"] = f"storage does not answer, for {silent // 10 * 10:.0f} s now: see that its server is up"
        progress["error"] = describe_orphan(self.job) or progress["error"]
        return progress

    def _write_status(self) -> None:
        status = {"pid": os.getpid(), **self._progress()}
        if status != self._written and self.job.path.exists():
            with contextlib.suppress(OSError):  # full memory must not end the process that could empty it
                self.job.notes.write_agent_status(status)
            self._written = status

    async def _keep_writing_status(self) -> None:
        """Writes the status even while the drain hangs. Trainers take the file's time as the agent's sign of life."""
        while True:
            await asyncio.sleep(_CHECK_EVERY)
            self._write_status()
            with contextlib.suppress(OSError):
                os.utime(self.job.paths.agent_status)

    def _stop(self) -> None:
        self.stopping = True

    def _quit(self) -> None:
        self.quitting = True
        self.drainer.hurry()
        self._leave_if_stuck()

    def _leave_if_stuck(self) -> None:
        """Ends the process when storage hangs: the drain in hand, and the process with it, would never end."""
        if self._silent() > _HANGS_AFTER:
            log.error("the agent ends in the middle of a drain, as storage hangs: the step stays in memory")
            os._exit(1)
        asyncio.get_running_loop().call_later(_CHECK_EVERY, self._leave_if_stuck)

    def _urgent(self, on: bool) -> None:
        self.drainer.hurry(on=on or self.quitting)

    async def run(self) -> None:
        """Drains and answers until it is told to end, the job ends, or the lock is lost."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._quit)
        listener = listen(self.job.paths.agent_socket)
        answering = loop.create_task(answer_requests(listener, self.status, self._stop, self.monitor.send_to))
        tasks = [answering, loop.create_task(self.monitor.serve()), loop.create_task(self._keep_writing_status())]
        log.info("agent %d serves %s", os.getpid(), self.job.path)
        try:
            while not self.quitting and self.lock.held():  # without the lock the job has another agent, or none
                busy = await loop.run_in_executor(self._behind, self._work)
                if not busy and await loop.run_in_executor(self._behind, self._done):
                    return
                await asyncio.sleep(0 if busy else _IDLE if self._idle else TICK)
        finally:
            for task in tasks:
                task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await answering  # the last answer, such as that to "stop", is on its way

    def _work(self) -> bool:
        alone = not self.job.trainers()
        if alone and not self._idle:
            try:
                rebuild_dead_ranks(self.job)
            except OSError as error:  # no open files are left, for one: the next round tries again
                self.drainer.progress.error = explain(error)
                return False
        self._idle = alone
        if not alone:
            self._told = False
        elif not self._told and (self.monitor.has_seen_all or read_start(self.job) is None):
            # A lock is free a moment before the death is noticed. After a good end there is none to be noticed: a rank
            # that calls close() inside of guard() stays connected, and waits for this agent.
            open_incident(self.job)
            self._told = True
        busy = self.drainer.tick()
        self._write_status()
        return busy

    def _done(self) -> bool:
        """Returns True if the agent is to end now. Gives the job's memory back first, once storage has all of it."""
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


def run(job: JobDir) -> int:
    """Serves one job until it is over. Returns the exit code: 0 also when another agent already serves it."""
    job.check()
    lock = Lock(job.paths.agent_lock)
    if not job.path.is_dir():
        return 0  # the job ended before its agent had come up
    if not lock.acquire(1.0):
        log.info("this agent ends, as another one serves %s", job.path)
        return 0
    _trim()
    asyncio.run(Agent(job, lock).run())
    log.info("agent %d ends", os.getpid())
    return 0
