"""Serves a user's files on this node: carries them to their paths, and ends when nobody needs them in memory."""

from __future__ import annotations

import os
import time
from typing import Any

from rekindle.agent.drain import TICK
from rekindle.agent.file_drain import FileDrainer
from rekindle.agent.serving import IDLE, Service
from rekindle.common.os_errors import explain
from rekindle.errors import FormatError, RekindleError
from rekindle.memory.files_dir import FilesDir
from rekindle.memory.lock import Lock

__all__ = ["FilesAgent"]

_IDLE_TIMEOUT = 900.0
"""Seconds without a process that saves, where no such process has left its own choice."""


class FilesAgent(Service):
    """The agent of a user's files on this node."""

    job: FilesDir
    drainer: FileDrainer

    def __init__(self, store: FilesDir, lock: Lock) -> None:
        super().__init__(store, lock, FileDrainer(store))
        self._alone_since = time.monotonic()

    def status(self) -> dict[str, Any]:
        return {
            "pid": os.getpid(),
            "stopping": self.stopping,
            "trainers": self.job.trainers(),
            "memory_bytes": self.job.held_bytes(),
            **self._progress(),
        }

    def _stays(self) -> str:
        return "its file stays in memory"

    def _work(self) -> bool:
        self.pause = TICK if self.job.trainers() else IDLE
        busy = self.drainer.tick()
        self._write_status()
        return busy

    def _done(self) -> bool:
        now = time.monotonic()
        if self.job.trainers():
            self._alone_since, self.stopping = now, False
            return False
        if not self.job.path.exists():
            return True
        try:
            info = self.job.read_job()
        except (OSError, FormatError):
            info = None
        if not self.stopping and now - self._alone_since <= (info.idle_timeout if info else _IDLE_TIMEOUT):
            return False
        try:
            self.job.let_go()
            self.drainer.give_up_waiting()
            return self.drainer.pending() is None and self.job.remove()
        except (OSError, RekindleError) as error:
            self.drainer.progress.error = explain(error)
            return False
