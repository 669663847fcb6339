"""The agent's life: take the lock, drain, answer, and leave when nobody needs it any more."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import json
import logging
import os
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import Any

from rekindle.agent.drain import TICK, Drainer
from rekindle.agent.http import serve
from rekindle.agent.monitor import RankMonitor
from rekindle.common.os_errors import explain
from rekindle.errors import FormatError, RekindleError
from rekindle.format.receipt import write_atomic
from rekindle.memory.job import JobInfo
from rekindle.memory.job_dir import JobDir
from rekindle.memory.lock import Lock
from rekindle.memory.rebuild import rebuild_dead_ranks
from rekindle.storage.throttle import lower_priority

__all__ = ["run", "describe_orphan"]

log = logging.getLogger("rekindle.agent")

_IDLE = 0.5
"""Seconds between two looks when no trainer is there and nothing is to be drained: somebody may come back."""
_SILENT, _TELL_EVERY = 10.0, 1.0
"""Seconds without an answer after which storage is said to hang, and an agent that was told to go gives up the drain in
hand; and seconds between looks whether it does."""
_NO_JOB = 60.0
"""Seconds that an agent waits for a trainer to say what the job is."""


class Agent:
    """One job's agent on this node. Everything it would miss after its death is in files."""

    def __init__(self, job: JobDir, lock: Lock) -> None:
        self.job = job
        self.lock = lock
        self.drainer = Drainer(job)
        self.monitor = RankMonitor(job, self._urgent)
        self.stopping = False
        """Leave, and give the memory back, once everything is durable."""
        self.quitting = False
        """Leave after the drain in hand; the memory stays."""
        self._alone_since = time.monotonic()
        self._idle = False
        """Whether the last trainer has gone, and what it left has been put together."""
        self._written = ""
        # The event loop keeps its priority: it must answer, and notice faults, while training has all cores busy.
        self._behind = ThreadPoolExecutor(1, thread_name_prefix="rekindle-drain", initializer=lower_priority)

    def _info(self) -> JobInfo | None:
        """What the job is; None as long as that is not known, or can't be read, of which the drain tells."""
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
            **self._progress(),
        }

    def _silent(self) -> float:
        """Seconds since storage has last answered, if it is asked for something."""
        moved = self.drainer.progress.moved
        return 0.0 if moved is None else time.monotonic() - moved

    def _progress(self) -> dict[str, Any]:
        """That of the drain. A store that hangs can't say so itself."""
        progress = asdict(self.drainer.progress)
        del progress["moved"]
        silent = self._silent()
        if silent > _SILENT:
            progress["error"] = f"storage does not answer, for {silent // 10 * 10:.0f} s now: see that its server is up"
        progress["error"] = describe_orphan(self.job) or progress["error"]
        return progress

    def _write_status(self) -> None:
        text = json.dumps({"pid": os.getpid(), **self._progress()})
        if text != self._written and self.job.path.exists():
            with contextlib.suppress(OSError):  # full memory must not end the one who could empty it
                write_atomic(self.job.paths.agent_status, text.encode())
            self._written = text

    async def _go_on_telling(self) -> None:
        """While the drain may hang in storage. The file's time is the sign of life that trainers look for."""
        while True:
            await asyncio.sleep(_TELL_EVERY)
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
        """Storage that hangs keeps the drain in hand for ever, and this process with it."""
        if self._silent() > _SILENT:
            log.error("storage hangs: left in the middle of a drain; memory has what it was draining")
            os._exit(1)
        asyncio.get_running_loop().call_later(_TELL_EVERY, self._leave_if_stuck)

    def _urgent(self, on: bool) -> None:
        self.drainer.hurry(on or self.quitting)

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._quit)
        runner = await serve(self.job.paths.agent_socket, self.status, self._stop, self.monitor.tell)
        tasks = [loop.create_task(self.monitor.serve()), loop.create_task(self._go_on_telling())]
        log.info("agent %d serves %s", os.getpid(), self.job.path)
        try:
            while not self.quitting and self.lock.held():  # else the job has another agent, or none
                busy = await loop.run_in_executor(self._behind, self._work)
                if not busy and await loop.run_in_executor(self._behind, self._done):
                    return
                await asyncio.sleep(0 if busy else _IDLE if self._idle else TICK)
        finally:
            for task in tasks:
                task.cancel()
            await runner.cleanup()

    def _work(self) -> bool:
        alone = not self.job.trainers()
        if alone and not self._idle:
            rebuild_dead_ranks(self.job)
        self._idle = alone
        busy = self.drainer.tick()
        self._write_status()
        return busy

    def _done(self) -> bool:
        """Whether to leave now; with the job's memory given back, unless storage still lacks something."""
        now = time.monotonic()
        if self.job.trainers():
            self._alone_since, self.stopping = now, False
            return False
        alone = now - self._alone_since
        try:
            info = self.job.read_job()
            if info is None:
                return alone > _NO_JOB or not self.job.path.exists()
            empty = next(self.job.snapshots.shard_ids(), None) is None
            if not (empty or self.stopping or alone > info.idle_timeout) or self.monitor.reporting:
                return False
            return self.drainer.pending() is None and self.job.remove()
        except (OSError, RekindleError) as error:
            self.drainer.progress.error = explain(error)
            return False


def describe_orphan(job: JobDir) -> str | None:
    """What to tell of snapshots that nobody can drain, for somebody has removed what the trainers wrote of the job."""
    if os.path.exists(job.path / "job.json"):
        return None
    newest = max((stamp.step for stamp, _ in job.snapshots.shard_ids()), default=None)
    if newest is None:
        return None
    return (
        f"step {newest} stays in memory: {job.path / 'job.json'}, which says where to carry it, is gone: start the job "
        "again on this node, it goes on from there, or give the step up with 'rekindle stop --discard ROOT'"
    )


def _trim() -> None:
    """Give back what importing left over: some megabytes, of the few that an agent may hold."""
    gc.collect()
    if sys.platform.startswith("linux"):
        getattr(ctypes.CDLL(None), "malloc_trim", lambda pad: None)(0)


def run(job: JobDir) -> int:
    """Serve one job until it is over. Returns 0 also when another agent is already there."""
    job.check()
    lock = Lock(job.paths.agent_lock)
    if not job.path.is_dir():
        return 0  # the job ended before its agent had come up
    if not lock.acquire(1.0):
        log.info("another agent serves %s", job.path)
        return 0
    _trim()
    asyncio.run(Agent(job, lock).run())
    log.info("agent %d leaves", os.getpid())
    return 0
