"""What looks for work again and again leaves the processor to those who train."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

from rekindle.agent.drain import TICK, Drainer
from rekindle.agent.serving import Service
from rekindle.memory.job_dir import JobDir
from rekindle.memory.lock import Lock

LASTS = 1.5
"""Seconds for which a service works."""


class Looking(Service):
    """One whose rounds take so many seconds of a core, and find nothing to do."""

    def __init__(self, job: JobDir, lock: Lock, cost: float) -> None:
        super().__init__(job, lock, Drainer(job))
        self._cost, self._until = cost, time.monotonic() + LASTS
        self.used = 0.0
        self.rounds = 0

    def status(self) -> dict[str, object]:
        return {}

    def _stays(self) -> str:
        return "nothing stays"

    def _work(self) -> bool:
        began = time.thread_time()
        while time.thread_time() < began + self._cost:
            pass
        self.used += self._cost
        self.rounds += 1
        return False

    def _done(self) -> bool:
        return time.monotonic() > self._until


def serve(place: Path, cost: float) -> Looking:
    job = JobDir(place)
    lock = Lock(place / "agent.lock")
    assert lock.acquire()
    service = Looking(job, lock, cost)
    asyncio.run(service.run())
    return service


def test_rounds_that_find_nothing_take_a_hundredth_of_a_core(tmp_path: Path) -> None:
    dear = serve(tmp_path, 0.002)
    assert dear.used <= 0.01 * LASTS + 2 * 0.002, f"{dear.rounds} rounds"


def test_cheap_rounds_are_as_frequent_as_they_may_be(tmp_path: Path) -> None:
    assert serve(tmp_path, 0.0).rounds > 0.3 * LASTS / TICK
