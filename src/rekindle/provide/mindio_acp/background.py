"""Does the saves of ``CheckpointHelper`` in a thread, beside the training."""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait

from rekindle.common.workers import Workers

__all__ = ["Background", "background"]

log = logging.getLogger("rekindle")


class _Job:
    """Work that reads the state of the training, until it says that it has a copy."""

    def __init__(self, work: Callable[[Callable[[], None]], object]) -> None:
        self.work, self.enter = work, _devices()
        self.copied = threading.Event()
        self.done: Future[object] = Future()


class Background:
    """Does one thing after another, in the order of this process's calls, which ranks that gather agree on.

    Thread-safe. A forked child begins anew.
    """

    def __init__(self) -> None:
        self._begin()

    def _begin(self) -> None:
        self._workers = Workers(1, "mindio-save")
        self._lock = threading.Lock()
        self._jobs: list[_Job] = []
        """Work that goes on, in order."""
        self._worker: int | None = None
        """Thread that does the work."""
        self._failed = False
        """True if some has failed, and ``finish`` has not told of it."""

    def submit(self, work: Callable[[Callable[[], None]], object]) -> None:
        """Has ``work`` done, which is given a function to call once it has its copy.

        What it raises is logged, and told of by ``finish``.
        """
        job = _Job(work)
        with self._lock:
            job.done = self._workers.submit(lambda: self._do(job))
            self._jobs.append(job)

    def _do(self, job: _Job) -> None:
        """Does the work. Whatever becomes of it, nobody waits for its copy after that."""
        self._worker = threading.get_ident()
        try:
            job.enter()
            job.work(job.copied.set)
        except BaseException:
            self._failed = True
            log.exception("a checkpoint was not saved in the background; the training goes on")
        finally:
            job.copied.set()

    def copied(self) -> None:
        """Tells that the work that is being done has its copy."""
        with self._lock:
            running = next((job for job in self._jobs if not job.done.done()), None)
        if running is not None:
            running.copied.set()

    def wait_until_copied(self) -> None:
        """Returns once all work has its copy, or has ended.

        Without a bound: to go on before that would change what is being saved.
        """
        for job in self._going_on():
            job.copied.wait()

    def _going_on(self) -> list[_Job]:
        """Lists the work that the calling thread can wait for: none where it does that work itself."""
        with self._lock:
            self._jobs = [job for job in self._jobs if not job.done.done()]
            return [] if threading.get_ident() == self._worker else list(self._jobs)

    def finish(self, until: float) -> bool:
        """Waits for all work, until a time of ``time.monotonic``. True if some goes on, or failed since a last call."""
        jobs = [job.done for job in self._going_on()]
        going_on = wait(jobs, max(0.0, until - time.monotonic())).not_done
        failed, self._failed = self._failed, False
        return failed or bool(going_on)


def _devices() -> Callable[[], None]:
    """Returns a function that lets another thread work on the devices of this one, behind what it has queued there."""
    if "torch" not in sys.modules:
        return lambda: None
    from rekindle.devices.table import current_devices, enter, require_backend  # noqa: PLC0415  only beside torch

    devices = current_devices()
    events = [require_backend(device).current_stream(device).record_event() for device in devices]

    def come() -> None:
        enter(devices)
        for device, event in zip(devices, events, strict=True):
            require_backend(device).current_stream(device).wait_event(event)

    return come


background = Background()
"""The process's background saves. One, as their order counts."""
os.register_at_fork(after_in_child=background._begin)
