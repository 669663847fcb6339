"""Serves one directory of the memory store: drains it, writes a status, answers requests, ends in good order."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import time
from abc import ABC, abstractmethod
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import Any, Protocol

from rekindle.agent.drain import TICK
from rekindle.agent.listener import answer_requests, listen
from rekindle.agent.ticks import next_tick
from rekindle.common.priority import lower_priority
from rekindle.memory.job_dir import JobDir
from rekindle.memory.lock import Lock

__all__ = ["IDLE", "Drains", "Service"]

log = logging.getLogger("rekindle.agent")

IDLE = 0.5
"""Seconds between two checks while there is no trainer and nothing to drain."""
_RESTING = 0.1
"""Seconds between two looks if there may be something to do again. To wake up takes 0.2 ms of a core."""
_HANGS_AFTER, _CHECK_EVERY = 10.0, 1.0
"""Seconds without an answer after which storage is reported to hang, and an agent that was told to end gives up the
drain in hand; then the seconds between two checks of that."""


class Drains(Protocol):
    """Carries a directory's contents to storage."""

    progress: Any
    """A dataclass with ``moved`` and ``error``, as in ``DrainProgress``."""

    def hurry(self, *, on: bool = True) -> None: ...

    def tick(self) -> bool: ...


class Service(ABC):
    """The agent of one directory on this node. All that its successor would need is in files."""

    pause = TICK
    """Seconds between two rounds of work that found nothing to do."""

    def __init__(self, job: JobDir, lock: Lock, drainer: Drains) -> None:
        self.job = job
        self.lock = lock
        self.drainer = drainer
        self.stopping = False
        """True once the agent is to end, and to give the memory back, as soon as everything is durable."""
        self.quitting = False
        """True once the agent is to end after the drain in hand. The memory stays."""
        self._written: dict[str, Any] = {}
        # The event loop keeps its priority: it must answer, and notice faults, while training has all cores busy.
        self._behind = ThreadPoolExecutor(1, thread_name_prefix="rekindle-drain", initializer=lower_priority)

    @abstractmethod
    def status(self) -> dict[str, Any]:
        """Returns the answer to ``GET /status``."""

    @abstractmethod
    def _work(self) -> bool:
        """Does a round of work. True if it did something, so that another round may follow at once."""

    def _rests(self) -> bool:
        """Returns True if a round of work would find nothing to do now. Asked often: it takes little time."""
        return False

    def _round(self) -> tuple[bool, bool]:
        """Returns if a round of work did something, and if the agent is to end now."""
        busy = self._work()
        return busy, not busy and self._done()

    @abstractmethod
    def _done(self) -> bool:
        """Returns True if the agent is to end now. Gives memory back first, once storage has all of it."""

    def _watches(self) -> list[Coroutine[Any, Any, None]]:
        """Returns what else runs in the event loop until the end."""
        return []

    def _send_to(self, rank: int, message: dict[str, Any]) -> bool:
        """Sends a message to a rank. False when it isn't connected."""
        return False

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
            await next_tick(_CHECK_EVERY)
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
            log.error("the agent ends in the middle of a drain, as storage hangs: %s", self._stays())
            os._exit(1)
        asyncio.get_running_loop().call_later(_CHECK_EVERY, self._leave_if_stuck)

    @abstractmethod
    def _stays(self) -> str:
        """Names what stays in memory when a drain is given up."""

    async def run(self) -> None:
        """Drains and answers until it is told to end, the work ends, or the lock is lost."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._quit)
        listener = listen(self.job.paths.agent_socket)
        answering = loop.create_task(answer_requests(listener, self.status, self._stop, self._send_to))
        tasks = [answering, *map(loop.create_task, self._watches()), loop.create_task(self._keep_writing_status())]
        log.info("agent %d serves %s", os.getpid(), self.job.path)
        try:
            while not self.quitting and self.lock.held():  # without the lock the job has another agent, or none
                if self._rests():
                    await next_tick(_RESTING)
                    continue
                busy, done = await loop.run_in_executor(self._behind, self._round)
                if done:
                    return
                await asyncio.sleep(0 if busy else self.pause)
        finally:
            for task in tasks:
                task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await answering  # the last answer, such as that to "stop", is on its way
