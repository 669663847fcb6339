"""The first steps of a job: how long each is held up, and how fast training is while memory for snapshots is made.

Every process starts with nothing: no snapshot's memory, no optimizer state. ``python bench/first.py`` runs them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from contenders import Contender, DcpAsync, RekindleSnapshots
from machine import settle
from task import Task
from training import Training

__all__ = ["FIRST", "run_first"]

FIRST: dict[str, tuple[type[Contender], bool]] = {
    "training alone": (Contender, False),
    "Rekindle": (RekindleSnapshots, True),
    "dcp.async_save": (DcpAsync, False),
}
"""Contenders, and whether each saves at every step; else at the first one only."""


def run_first(task: Task, tell: Callable[[dict[str, Any]], object]) -> None:
    """``count`` steps. In each: seconds of all of it, of the call that saves, and of the wait before the update."""
    kind, always = FIRST[task.name]
    settle(task.settle)
    training = Training(task.size, task.batch)
    contender = kind(training, Path(task.target))
    samples = []
    for step in range(1, task.count + 1):
        began = time.perf_counter()
        training.work()
        contender.ready()
        wait = training.update()
        called = time.perf_counter()
        if kind is not Contender and (always or step == 1):
            contender.save(step)
        ended = time.perf_counter()
        samples.append(
            {"seconds": ended - began, "call": ended - called, "wait": wait, "making": _is_making(contender)}
        )
    result: dict[str, Any] = {"state_bytes": training.nbytes(), "samples": samples}
    if isinstance(contender, RekindleSnapshots):
        result["left_out"] = contender.checkpointer.metrics.left_out
        result["saves"] = contender.checkpointer.metrics.saves
    tell(result)
    contender.close()


def _is_making(contender: Contender) -> bool:
    """True if memory for snapshots is being made."""
    if not isinstance(contender, RekindleSnapshots):
        return False
    memory = contender.checkpointer._saver.memory
    return memory is not None and not memory.slots.wait_made(0)
