"""The trainer's side of the agent: start it, notice that it is gone, do its work when it can't be had."""

from __future__ import annotations

import json
import logging
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

from rekindle.agent.drain import Drainer
from rekindle.snapshot.lock import Lock
from rekindle.snapshot.memory import JobDir
from rekindle.storage.pace import step_back

__all__ = ["AgentKeeper"]

log = logging.getLogger("rekindle")

_LOOK_EVERY = 0.5
"""Seconds between looks at the agent's lock: a look costs some microseconds, so not at every step."""
_START_WITHIN = 10.0
_ATTEMPTS = 3
TICK = 0.05
"""Seconds between two looks for something to drain."""


class AgentKeeper:
    """Sees to it that somebody drains this job's memory: an agent or, when none will live, a thread of this process."""

    def __init__(self, job: JobDir) -> None:
        self.job = job
        self._process: subprocess.Popen[bytes] | None = None
        self._started = 0.0
        self._attempts = 0
        self._looked = -_LOOK_EVERY
        self._thread: threading.Thread | None = None
        self._told: str | None = None
        self._stop = threading.Event()
        self._drainer = Drainer(job)

    def check(self) -> None:
        """Look after the agent, at most twice a second. Never waits for it."""
        now = time.monotonic()
        if self._thread is not None or now - self._looked < _LOOK_EVERY:
            return
        self._looked = now
        ended = self._process is not None and self._process.poll() is not None  # also reaps it
        if self.job.agent() is not None:
            self._attempts = 0
            self._tell()
            return
        if self._process is not None and not ended and now - self._started < _START_WITHIN:
            return
        if self._attempts >= _ATTEMPTS:
            self._drain_here(f"it did not stay, see {self.job.log}")
            return
        self._attempts += 1
        self._started = now
        try:
            self._process = spawn(self.job)
        except OSError as error:
            self._drain_here(str(error))

    def _tell(self) -> None:
        """Pass on what the agent suffers from, once, and that it is over."""
        try:
            error = json.loads(self.job.agent_status.read_bytes())["error"]
        except (OSError, ValueError, KeyError):
            return
        if (error is None) != (self._told is None):
            log.warning("drain: %s", error or "storage takes checkpoints again")
        self._told = error

    def _drain_here(self, why: str) -> None:
        log.warning("no agent on this node (%s): this process drains to storage itself, in a thread", why)
        self._thread = threading.Thread(target=self._drain, name="rekindle-drain", daemon=True)
        self._thread.start()

    def _drain(self) -> None:
        step_back()
        lock = Lock(self.job.agent_lock)
        while not self._stop.is_set():
            try:
                if lock.acquire(1.0):
                    while not self._stop.wait(TICK):
                        self._drainer.tick()
            except Exception:
                log.exception("the drain failed and is tried again")
                lock.release()
                self._stop.wait(1.0)
        lock.release()

    def close(self) -> None:
        """Stop draining here. An agent is left to itself."""
        self._stop.set()
        self._drainer.hurry()
        if self._thread is not None:
            self._thread.join(timeout=60)
        if self._process is not None:
            self._process.poll()


def spawn(job: JobDir) -> subprocess.Popen[bytes]:
    """Start an agent in a session of its own, so that what kills the trainers' process group spares it."""
    package = str(Path(__file__).resolve().parents[2])
    installed = Path(package).name in ("site-packages", "dist-packages")  # then it is found without our help
    path = os.pathsep.join(filter(None, ["" if installed else package, os.environ.get("PYTHONPATH", "")]))
    with open(job.log, "ab") as output:
        return subprocess.Popen(
            [*_last_at_the_disk(), sys.executable, "-m", "rekindle.agent", str(job.path)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            cwd="/",
            env={**os.environ, "PYTHONPATH": path, "MALLOC_ARENA_MAX": "1"},
            start_new_session=True,
        )


def _last_at_the_disk() -> list[str]:
    """A command that runs another one, in its own place, with the lowest I/O priority that still gets its turn.

    Disks whose scheduler knows no priorities ignore it; where it can't be set, ``-t`` lets the agent start without.
    BusyBox's ionice has no ``-t``.
    """
    ionice = shutil.which("ionice")
    if ionice is None or Path(ionice).resolve().name == "busybox":
        return []
    return [ionice, "-c", "2", "-n", "7", "-t"]
