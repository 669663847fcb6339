"""A real loop of training, in windows with and without a save at every step, in alternation in the same process."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from contenders import Contender
from machine import held_bytes, settle
from registry import LOOP
from task import Task
from training import Copies, Training

__all__ = ["run_loop"]


def run_loop(task: Task, tell: Callable[[dict[str, Any]], object]) -> None:
    """``count`` pairs of windows, ``more["steps"]`` steps each; the first of a pair is the other kind in each pair."""
    steps = int(task.more["steps"])
    training = Training(task.size, task.batch)
    contender = LOOP[task.name](training, Path(task.target))
    training.work()
    training.update()
    contender.prepare()
    step = _window(training, contender, 1, 2)[1]  # first saves are slow, and are another part's business
    copies = Copies(task.size)
    pairs = []
    for number in range(task.count):
        settle(task.settle)
        pair: dict[str, float] = {"floor": copies.faulted()}
        for kind in ("plain", "saving") if number % 2 else ("saving", "plain"):
            if kind == "plain":
                pair[kind] = _window(training, None, step, steps)[0] / steps
            else:
                seconds, step = _window(training, contender, step, steps)
                pair[kind] = seconds / steps
        pairs.append(pair)
    result = {"steps": steps, "pairs": pairs, "skipped": contender.skipped, "saves": step - 1}
    result["held"] = held_bytes(Path(task.more["memory"]))
    contender.close()
    tell(result)


def _window(training: Training, contender: Contender | None, first: int, steps: int) -> tuple[float, int]:
    """Seconds of ``steps`` steps, and the number of the next one.

    One save is begun before, and the last one's end isn't counted: so there are as many of each part of a save as
    there are steps. What is still being written is waited for, so that it doesn't slow the next window.
    """
    last = first + steps
    if contender is not None:
        contender.save(first)
    began = time.perf_counter()
    for step in range(first + 1, last + 1):
        training.work()
        if contender is not None:
            contender.ready()
        training.update()
        if contender is not None:
            contender.save(step)
    seconds = time.perf_counter() - began
    if contender is not None:
        contender.ready()
        contender.finish(last)
        for step in range(first, last + 1):
            contender.tidy(step)
    return seconds, last + 1
