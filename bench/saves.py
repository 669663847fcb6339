"""Single saves, each with the machine to itself: what they stall, when they are durable; and Rekindle's drain alone."""

from __future__ import annotations

import os
import signal
import statistics
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from contenders import Contender, Rekindle
from disk import Disk
from machine import held_bytes, settle, status_bytes
from registry import CONTENDERS
from task import Task
from training import Copies, Training

__all__ = ["run_calibrate", "run_drain", "run_saves"]

Tell = Callable[[dict[str, Any]], object]


def run_calibrate(task: Task, tell: Tell) -> None:
    """The batch with which a step takes as long as it should, for all contenders the same."""
    training = Training.calibrate(task.size, task.more["compute"])
    steps = [training.work() + _timed(training.update) for _ in range(3)]
    tell(
        {
            "batch": training.batch,
            "step": statistics.median(steps),
            "state_bytes": training.nbytes(),
            "tensors": len(training.tensors()),
        }
    )


def _timed(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def run_saves(task: Task, tell: Tell) -> None:
    """First save and ``count`` later ones, each of a state that has changed, the one before it being durable."""
    training = Training(task.size, task.batch)
    began = time.perf_counter()
    contender = CONTENDERS[task.name](training, Path(task.target))
    setup = time.perf_counter() - began
    training.work()  # the first step, at the end of which AdamW makes its state
    training.update()
    copies = Copies(task.size)
    before = status_bytes("self", "RssAnon") + status_bytes("self", "RssFile")
    Path("/proc/self/clear_refs").write_text("5")  # from here on counts the high-water mark of resident memory
    samples = [_save(training, contender, copies, step, task.settle) for step in range(1, task.count + 2)]
    helpers = sum(status_bytes(pid, "RssAnon") for pid in contender.helpers())
    result = {
        "state_bytes": training.nbytes(),
        "tensors": len(training.tensors()),
        "setup": setup,
        "memory": {
            "peak": status_bytes("self", "VmHWM") - before + helpers,
            "shared": status_bytes("self", "RssShmem"),
            "held": held_bytes(Path(os.environ["REKINDLE_MEMORY"])),
        },
        "skipped": contender.skipped,
        "samples": samples,
    }
    tell(result)
    if isinstance(contender, Rekindle):
        # Killed rather than closed, so that its memory is left for a successor to restore from.
        os.kill(os.getpid(), signal.SIGKILL)
    contender.close()


def _save(training: Training, contender: Contender, copies: Copies, step: int, limit: float) -> dict[str, Any]:
    """One save with training before, during and after it, until it is durable. Seconds."""
    contender.prepare()
    idle = settle(limit)
    quiet = statistics.median(training.work() for _ in range(3))
    copy = copies.faulted()
    fingerprint = training.fingerprint()
    durable: list[float] = []

    def watch() -> None:
        contender.finish(step)
        durable.append(time.perf_counter())

    watcher = threading.Thread(target=watch, name="bench-watch", daemon=True)
    began = time.perf_counter()
    contender.save(step)
    call = time.perf_counter() - began
    watcher.start()
    working = [training.work()]
    blocked = time.perf_counter()
    contender.ready()
    wait = time.perf_counter() - blocked + training.update()
    while watcher.is_alive():
        working.append(training.work())
    watcher.join()
    if not durable:
        raise SystemExit(f"{type(contender).__name__}: step {step} was not written")
    contender.tidy(step)
    return {
        "step": step,
        "idle_before": idle,
        "fingerprint": fingerprint,
        "floor": copy,
        "call": call,
        "wait": wait,
        "stall": call + wait,
        "step_longer": call + wait + working[0] - quiet,
        "durable": durable[0] - began,
        "lost": call + wait + sum(working) - len(working) * quiet,
    }


def run_drain(task: Task, tell: Tell) -> None:
    """Times Rekindle's agent as it carries a snapshot to storage while the trainer does nothing, beside the disk's
    own speed just before and just after. The first one isn't counted twice: it is there as ``samples[0]``.
    """
    training = Training(task.size, task.batch)
    training.work()
    training.update()
    root = Path(task.target)
    contender = Rekindle(training, root)
    disk = Disk(root.parent / "disk-floor", training.nbytes())
    samples = []
    for step in range(1, task.count + 2):
        idle = settle(task.settle)
        before = disk.write()
        training.work()
        training.update()
        contender.checkpointer.save(step, wait="memory")
        began = time.perf_counter()
        contender.finish(step)
        seconds = time.perf_counter() - began
        after = disk.write()
        samples.append({"idle_before": idle, "drain": seconds, "disk": (before + after) / 2})
    disk.close()
    contender.close()
    tell({"state_bytes": training.nbytes(), "by": disk.by, "samples": samples})
