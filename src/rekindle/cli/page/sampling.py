"""Looks at this node's jobs once a second: no file keeps when each step was completed, and when each drain was."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field

from rekindle.cli.operations import status_pages
from rekindle.errors import RekindleError
from rekindle.memory.costs import rank_costs
from rekindle.memory.job_dir import JobDir

__all__ = ["Samples", "Sampler", "steps_per_second"]

_EVERY = 1.0
"""Seconds between two looks, at least: nine times as long as a look takes if that is more."""
_KEPT = 6000
"""Samples of a job. When there are more, every second one goes."""
_DRAINS = 1000
_RECENT = 30.0
"""Seconds over which the rate of steps is taken."""


@dataclass
class Samples:
    """Steps and drains of one job that were seen, oldest first. Times in seconds since 1970."""

    steps: list[tuple[float, int]] = field(default_factory=list)
    """The step that all ranks of this node had completed, at each time at which it was another one."""
    drains: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=_DRAINS))
    """Begin and end of each drain."""

    def add(self, at: float, step: int) -> None:
        """Takes a sample. Of one that is as the one before only the first and the last stay."""
        if len(self.steps) > 1 and self.steps[-1][1] == self.steps[-2][1] == step:
            self.steps[-1] = at, step
        else:
            self.steps.append((at, step))
        if len(self.steps) > _KEPT:
            del self.steps[1:-1:2]


def steps_per_second(steps: list[tuple[float, int]]) -> float | None:
    """Returns the rate of the newest samples; None while it isn't known. After a restart it is the new one's."""
    if len(steps) < 2:
        return None
    end = steps[-1]
    first = end
    for sample in reversed(steps[:-1]):
        if sample[1] > first[1]:  # the job went back
            break
        first = sample
        if end[0] - sample[0] >= _RECENT and sample[1] < end[1]:
            break
    return (end[1] - first[1]) / (end[0] - first[0]) if end[0] > first[0] else None


class Sampler:
    """Takes samples of all jobs in a thread of its own."""

    def __init__(self, jobs: Callable[[], Iterable[JobDir]]) -> None:
        self._jobs = jobs
        self._found: dict[str, Samples] = {}
        self._lock = threading.Lock()
        self._end = threading.Event()

    def start(self) -> None:
        """Begins. The thread doesn't keep the process from ending."""
        threading.Thread(target=self._run, name="rekindle-ui-samples", daemon=True).start()

    def stop(self) -> None:
        """Takes no more samples."""
        self._end.set()

    def of(self, job: JobDir) -> Samples:
        """Returns a copy of what was seen of a job."""
        with self._lock:
            found = self._found.get(job.path.name, Samples())
            return Samples(list(found.steps), found.drains.copy())

    def look(self) -> None:
        """Takes one sample of each job."""
        for job in self._jobs():
            with suppress(OSError, RekindleError):
                self._look_at(job)

    def _look_at(self, job: JobDir) -> None:
        trainers = job.trainers()
        steps = [page.step for page in status_pages(job).values()] or [
            costs.step
            for rank, costs in rank_costs(job).items()
            if trainers.get(rank) == costs.pid and costs.step  # else it has not been restored yet
        ]
        drain = job.notes.last_drain()
        now, monotonic = time.time(), time.monotonic()
        with self._lock:
            seen = self._found.setdefault(job.path.name, Samples())
            if steps and min(steps) >= 0:
                seen.add(now, min(steps))
            if drain is not None and 0 <= drain[0] <= monotonic:
                began = now - (monotonic - drain[0])
                if not seen.drains or began > seen.drains[-1][0] + 0.5:  # one clock against the other: not to the bit
                    seen.drains.append((began, began + drain[1]))

    def _run(self) -> None:
        while True:
            began = time.monotonic()
            with suppress(OSError, RekindleError):  # the memory store may go and come
                self.look()
            if self._end.wait(max(_EVERY, 9 * (time.monotonic() - began))):
                return
