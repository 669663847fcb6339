"""Loads in a new process: the first one, and one into memory that is already there; verified; beside their floors."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from disk import Disk
from machine import evict, since_start
from registry import CONTENDERS, LOADS
from task import Task
from training import Copies, Training

__all__ = ["run_load"]


def run_load(task: Task, tell: Callable[[dict[str, Any]], object]) -> None:
    """Load the last checkpoint, its files not in the page cache, as far as that can be had; then again, in it."""
    way = LOADS[task.name]
    path = CONTENDERS[way.writer].path_of(Path(task.target), task.count + 1)
    training = Training(task.size, task.batch)
    if way.needs_state:
        training.work()
        training.update()
    copies = Copies(task.size)
    disk = Disk(path.parent.parent / "disk-floor", task.size)
    disk.write()
    result: dict[str, Any] = {"fresh_floor": copies.fresh(), "disk_read": disk.read(), "by": disk.by}
    disk.close()
    evict(path)
    result["started"] = since_start()
    for when in ("cold", "warm"):
        result[when] = way.load(training, path)
        if training.fingerprint() != task.fingerprint:
            raise SystemExit(f"{task.name}: the loaded state is not the one that was saved")
        began = time.perf_counter()
        training.work()  # so that the second load has something to do
        training.update()
        result[f"{when}_step"] = time.perf_counter() - began
        result[f"{when}_floor"] = copies.faulted()
    tell(result)
