"""Keeps an agent running for the trainers of a node; notices that it is gone, and drains in its place if none can
run."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from rekindle.agent.drain import TICK, Drainer
from rekindle.agent.serving import Drains
from rekindle.common.backoff import EARLY_TRIES, delays
from rekindle.common.os_errors import describe_error
from rekindle.common.priority import lower_priority
from rekindle.common.timeouts import in_background
from rekindle.errors import MemoryStoreError, RekindleError
from rekindle.format.fields import loads
from rekindle.memory.job import JobInfo
from rekindle.memory.job_dir import JobDir
from rekindle.memory.lock import Lock
from rekindle.storage.checks import describe_recreated_root

__all__ = ["AgentKeeper"]

log = logging.getLogger("rekindle")

_LOOK_EVERY = 0.5
"""Seconds between looks at the agent's lock: a look costs some microseconds, so not at every step."""
_START_WITHIN = 5.0
"""Seconds that nobody drains while an agent gets another chance to start."""
_SIGN_WITHIN = 10.0
"""Seconds within which an agent gives a sign of life, which it does each second."""
_STAYS = 1.0
"""Seconds after which an agent that has started is taken to stay: one that can't do its work ends at once."""


class AgentKeeper:
    """Keeps this job's memory drained: by an agent or, while none can run, by a thread of this process."""

    def __init__(
        self,
        job: JobDir,
        info: JobInfo,
        within: float = 10.0,
        changed: Callable[[bool], object] = lambda there: None,
        drainer: Drains | None = None,
    ) -> None:
        """``info`` is what an agent needs to know. If none starts ``within`` seconds, this process drains instead.

        ``changed`` is called, in another thread, with False when this process begins to drain and with True when an
        agent does so again. ``drainer`` is what drains here; by default one of snapshots.
        """
        self.job, self._root = job, info.root
        self._within, self._changed = within, changed
        self._process: subprocess.Popen[bytes] | None = None
        self._spawned = 0.0
        self._looked = -_LOOK_EVERY
        self._thread: threading.Thread | None = None
        self._logged_error: str | None = None
        self._deleted: int | None = -1
        """Newest step of the deleted root that was last told of."""
        self._sign, self._silent = 0, 0.0
        self._stop = threading.Event()
        self._drainer: Drains = drainer or Drainer(job)
        self._status: dict[str, Any] = {}
        try:
            job.write_job(info)
        except OSError as error:
            raise MemoryStoreError(f"{job.paths.job}: {describe_error(error)}") from error

    def begin(self) -> None:
        """Starts an agent before it returns, if there is none: should this process die, its session lives on."""
        if self.job.agent() is None:
            self._start()

    @property
    def agent_lives(self) -> bool:
        """True while there is an agent, or a process that is about to be one."""
        return self.job.agent() is not None or (self._process is not None and self._process.poll() is None)

    def replace(self, agent: int) -> None:
        """Has an agent followed by one with the environment of this process. It finishes the drain in hand before."""
        with suppress(OSError, RekindleError):
            self._process, self._spawned = spawn(self.job, after=agent), time.monotonic()

    def check(self) -> None:
        """Looks after the agent, at most twice a second. Never waits for it."""
        now = time.monotonic()
        passed = now - self._looked
        if passed < _LOOK_EVERY or (self._thread is not None and self._thread.is_alive()):
            return
        self._looked = now
        with suppress(OSError):  # something else is in its place, which the drain reports
            self.job.mend_job()
        if self._process is not None:
            self._process.poll()  # reaps it
        agent = self.job.agent()
        if agent is not None:
            self._watch_agent(agent, min(passed, 1.0))
            return
        self._silent = 0.0
        self._thread = threading.Thread(target=self._keep_running, name="rekindle-keep", daemon=True)
        with suppress(RuntimeError):  # no thread can be had now: the next look tries again
            self._thread.start()

    def _watch_agent(self, agent: int, passed: float) -> None:
        """Passes on what the agent reports; kills an agent that holds its lock and does nothing.

        Such as a stopped one: nothing is lost, for all it has is in files. Only time in which this process was looking
        counts: a node that sleeps takes both along.
        """
        report = self.pass_on_report()
        if report is None or report.get("in_place"):  # a process that saves too is not ours to kill, and gives no signs
            return
        try:
            sign = self.job.paths.agent_status.stat().st_mtime_ns
        except OSError:
            return
        self._silent = 0.0 if sign != self._sign else self._silent + passed
        self._sign = sign
        if self._silent > _SIGN_WITHIN:
            self._silent = 0.0
            log.warning(
                "agent %d gave no sign of life for %.0f s: it is killed, and another one is started",
                *(agent, _SIGN_WITHIN),
            )
            with suppress(OSError):
                os.kill(agent, signal.SIGKILL)

    def pass_on_report(self) -> dict[str, Any] | None:
        """Logs what the agent reports, each thing once: an error of the drain and its end, a root that is made anew.

        Returns the report; None if there is none of an agent that lives. One that is gone may have left its last one.
        """
        try:
            status: dict[str, Any] = loads(self.job.paths.agent_status.read_bytes())
            pid, error, anew, deleted = status["pid"], status["error"], status.get("anew"), status.get("deleted")
        except (OSError, ValueError, KeyError, TypeError):
            return None
        if pid != self.job.agent():
            return None
        self._log_drain_error(error)
        self._log_recreated_root(anew, deleted)
        return status

    def _keep_running(self) -> None:
        """Starts an agent, again and again until one stays. After three that didn't, drains here in between."""
        for number, pause in enumerate(delays(self._within), 1):
            why = self._start()
            here = number > EARLY_TRIES
            if self._stays(min(pause, _START_WITHIN) if here else pause):
                if here:
                    log.warning("an agent carries checkpoints to storage again")
                    self._changed(True)
                return
            if number == EARLY_TRIES:
                log.warning(
                    "no agent on this node (%s): this process drains to storage itself, in a thread, until one can be "
                    "started again",
                    why,
                )
                self._changed(False)
            if number >= EARLY_TRIES:
                try:  # in another thread: an agent would inherit its priority
                    in_background(partial(self._drain, pause), "rekindle-drain").result()
                except RuntimeError as error:  # no thread can be had
                    self._log_drain_error(str(error))
                    self._stop.wait(pause)
            if self._stop.is_set():
                return

    def _start(self) -> str:
        """Starts an agent. Returns what to look at if it doesn't stay."""
        try:
            self.job.mend_job()
            now = time.monotonic()
            if self._process is None or self._process.poll() is not None or now > self._spawned + _START_WITHIN:
                self._process, self._spawned = spawn(self.job), now
        except (OSError, RekindleError) as error:
            return str(error)
        return f"it did not stay, see {self.job.paths.agent_log}"

    def _stays(self, within: float) -> bool:
        """Returns True if an agent starts ``within`` so many seconds, and stays. False at once when no more is
        needed."""
        until = time.monotonic() + within
        since: float | None = None
        while since is None or time.monotonic() < since + min(_STAYS, within / 2):
            there = self.job.agent() is not None
            gone = since is not None and not there
            since = since or (time.monotonic() if there else None)
            if gone or self._stop.wait(TICK) or (since is None and time.monotonic() > until):
                return False
            if self._process is not None:
                self._process.poll()
        return True

    def _drain(self, seconds: float) -> None:
        lower_priority()
        until, lock = time.monotonic() + seconds, Lock(self.job.paths.agent_lock)
        self._status = {}  # an agent may have written its own since
        try:
            if lock.acquire(1.0):
                while time.monotonic() < until and not self._stop.wait(TICK) and lock.held():
                    self._drainer.tick()
                    self._write_status()
                    self._log_drain_error(self._drainer.progress.error)
                    self._log_recreated_root(self._drainer.progress.anew, self._drainer.progress.deleted)
        except Exception as error:
            self._log_drain_error(f"{type(error).__name__}: {error}")
        finally:
            lock.release()
        self._stop.wait(until - time.monotonic())

    def _write_status(self) -> None:
        """Writes the status of the drain here where an agent writes its own: all ranks of the node look there for its
        error."""
        progress = self._drainer.progress
        told = {"anew": progress.anew, "deleted": progress.deleted}
        status = {"pid": os.getpid(), "in_place": True, "error": progress.error, "waits": progress.waits, **told}
        if status != self._status:
            with suppress(OSError):  # memory is full, or gone
                self.job.notes.write_agent_status(status)
                self._status = status

    def _log_drain_error(self, error: str | None) -> None:
        """Logs an error of the drain once, and its end."""
        if error != self._logged_error and (error is None or self._logged_error is None):
            log.warning("drain: %s", error or "storage takes checkpoints again")
        self._logged_error = error

    def _log_recreated_root(self, step: int | None, deleted: int | None) -> None:
        """Logs once for each deletion that the root was deleted, and is made anew.

        The first try may fail, and another agent make the next one, with a newer step.
        """
        if step is not None and deleted != self._deleted:
            log.warning("%s", describe_recreated_root(self._root, step))
            self._deleted = deleted

    def close(self, seconds: float = 60.0) -> None:
        """Stops draining here, and gives the drain in hand so many seconds. An agent is left to itself."""
        self._stop.set()
        self._drainer.hurry()
        if self._thread is not None:
            self._thread.join(seconds)
        if self._process is not None:
            self._process.poll()


def spawn(job: JobDir, after: int | None = None) -> subprocess.Popen[bytes]:
    """Starts an agent in a session of its own, so that a signal to the trainers' process group spares it.

    ``after`` is the agent that it is to follow, and that it tells to end.
    """
    package = str(Path(__file__).resolve().parents[2])
    installed = Path(package).name in ("site-packages", "dist-packages")  # then it is found without our help
    path = os.pathsep.join(filter(None, ["" if installed else package, os.environ.get("PYTHONPATH", "")]))
    command = [*_last_at_the_disk(), sys.executable, "-m", "rekindle.agent", str(job.path)]
    if after is not None:
        command.append(str(after))
    with open(job.paths.agent_log, "ab") as output:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            cwd="/",
            env={**os.environ, "PYTHONPATH": path, "MALLOC_ARENA_MAX": "1"},
            start_new_session=True,
        )


def _last_at_the_disk() -> list[str]:
    """Returns a command that runs another one in its place, with the lowest I/O priority that still gets a turn.

    Disks whose scheduler knows no priorities ignore it. Where it can't be set, ``-t`` lets the agent start without.
    BusyBox's ionice has no ``-t``.
    """
    ionice = shutil.which("ionice")
    if ionice is None or Path(ionice).resolve().name == "busybox":
        return []
    return [ionice, "-c", "2", "-n", "7", "-t"]
