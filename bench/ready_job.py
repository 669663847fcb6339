"""One job of ``python bench/ready.py``, in a process of its own, or the floor that it is measured by."""

from __future__ import annotations

import contextlib
import os
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from machine import settle
from task import Task
from training import Training

import rekindle
from rekindle.memory.pages import Pages
from rekindle.memory.slots import Slots

__all__ = ["JOBS", "run_floor", "run_ready"]

JOBS: dict[str, dict[str, Any] | None] = {
    "training alone": None,
    "memory is made": {"snapshot_every": 10**9, "persist_every": 10**9},
    "snapshots": {"snapshot_every": 1, "persist_every": 10**9},
}
"""Settings of Rekindle; None for none. The second one shows what the making alone costs."""

Tell = Callable[[dict[str, Any]], object]


def run_floor(task: Task, tell: Tell) -> None:
    """Seconds of one core for ``size`` bytes of memory: the least of ``count`` tries."""
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})  # one thread makes them then
    samples = []
    with tempfile.TemporaryDirectory(dir=os.environ["REKINDLE_MEMORY"]) as place:
        for _ in range(task.count):
            fd = os.open(Path(place) / "file", os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
            os.ftruncate(fd, task.size)
            pages = Pages(fd, task.size)
            began = time.process_time()
            pages.make(fd, task.size, None, lambda: True)
            samples.append(time.process_time() - began)
            del pages
            os.close(fd)
    tell({"seconds": min(samples)})


class _Watch:
    """Notes when each slot is ready, by a thread that looks now and then."""

    def __init__(self) -> None:
        self.began = 0.0
        """Time at which memory was asked for."""
        self.ready: list[float] = []
        """Seconds from then until the first slot was ready, the second, and the third."""
        self._over = threading.Event()
        self._reserve = Slots.reserve

    def start(self) -> None:
        def reserve(slots: Slots, *args: Any, **options: Any) -> None:
            self.began = self.began or time.perf_counter()
            self._reserve(slots, *args, **options)
            threading.Thread(target=self._look, args=(slots,), daemon=True).start()

        Slots.reserve = reserve  # type: ignore[method-assign]

    def _look(self, slots: Slots) -> None:
        while not self._over.wait(0.01):
            with contextlib.suppress(OSError):
                count = sum(slot.map is not None and 0 < slot.size <= slot.map.made for slot in list(slots.slots))
                self.ready += [time.perf_counter() - self.began] * (count - len(self.ready))

    def stop(self) -> None:
        self._over.set()


def run_ready(task: Task, tell: Tell) -> None:
    """``count`` steps: seconds of each, whether it has a snapshot, and when the memory of each slot was ready."""
    settle(task.settle)
    options, watch = JOBS[task.name], _Watch()
    training = Training(task.size, task.batch)
    training.work()
    training.update()  # the optimizer's state is there: memory is made for all of it
    checkpointer = None
    if options is not None:
        watch.start()
        state = {"model": training.model, "optimizer": training.optimizer}
        checkpointer = rekindle.Checkpointer(task.target, state, strict=True, **options)
        checkpointer.restore()
    steps = []
    for step in range(1, task.count + 1):
        began = time.perf_counter()
        training.work()
        training.update()
        if checkpointer is not None:
            checkpointer.step(step)
        ended = time.perf_counter()
        left_out = checkpointer.metrics.left_out if checkpointer is not None else 0
        steps.append({"seconds": ended - began, "ended": ended - watch.began, "left_out": left_out})
    watch.stop()
    found: dict[str, Any] = {"steps": steps, "ready": watch.ready, "bytes": training.nbytes()}
    if checkpointer is not None:
        checkpointer.latest()  # returns once the newest snapshot is in memory
        found["saves"] = checkpointer.metrics.saves
        found["in_memory"] = sum(not one.durable for one in checkpointer.checkpoints())
        checkpointer.close()
    tell(found)
