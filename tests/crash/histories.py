"""Which histories are looked at, and looking at them with several processes."""

from __future__ import annotations

import itertools
import logging
import multiprocessing
import os
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from tests.crash.explore import FULL, QUICK, Explorer, Step, Violation, sequences
from tests.crash.jobs import FORMS, OPERATIONS, race

__all__ = ["MEETINGS", "calls_of", "do", "explorer_in", "look_at_all", "scratch", "work"]

_SECOND_EVERY = {"quick": 100, "full": 40}
MEETINGS = 34
"""Calls of a node that publishes, before each of which the other one may come."""

_SEQUENCES = ("", "one operation", "two operations", "three operations")
_KILLED = "one killed, then another"

Work = tuple[str, tuple[Step, ...], "int | None"]
"""What kind of history; its operations; at which call two nodes meet at its end."""


def calls_of(path: Path) -> dict[str, int]:
    """How many calls each operation makes, after a save."""
    explorer = Explorer(path, QUICK)
    return {name: explorer.record([("save", None), (name, None)])[0].calls for name in OPERATIONS}


def killed(calls: dict[str, int], after: Iterable[str]) -> Iterator[tuple[Step, ...]]:
    """Each operation killed at each of its calls, and each of those after it."""
    for name, count in calls.items():
        for at, other in itertools.product(range(count), after):
            yield (("save", None), (name, at), (other, None))


def work(how: str, calls: dict[str, int]) -> list[Work]:
    """All histories."""
    full = how == "full"
    every: list[Work] = [(_SEQUENCES[len(steps)], steps, None) for steps in sequences(3 if full else 2)]
    if not full:  # exports have most states, and take longest
        every = [one for one in every if one[1][-1][0] != "export" or one[1][0][0] == "save"]
    after = tuple(OPERATIONS) if full else ("resume", "settle", "prune")
    some = {name: count for name, count in calls.items() if full or name in ("drain", "over")}
    every += [(_KILLED, steps, None) for steps in killed(some, after)]
    every += [(_KILLED, (("save", at), ("save", None)), None) for at in range(calls.get("save", 0))]
    befores: list[tuple[Step, ...]] = [(("save", None),), ()] if full else [(("save", None),)]
    every += [("two nodes publish at once", before, at) for before in befores for at in range(MEETINGS)]
    if full:
        every += [("exports in other formats", (("drain-two", None), (form, None)), None) for form in FORMS]
    return every


def explorer_in(path: Path, how: str = "quick") -> Explorer:
    return Explorer(path, second_every=_SECOND_EVERY[how])


def do(explorer: Explorer, how: str, one: Work) -> None:
    """Look at a history. ``full`` looks at every block of every file, but not in the many histories."""
    kind, steps, at = one
    explorer.effort = FULL if how == "full" and kind not in (_SEQUENCES[3], _KILLED) else QUICK
    explorer.explore(steps, race(at) if at is not None else None)


@contextmanager
def scratch() -> Iterator[Path]:
    """A place for a disk and a memory, best in memory."""
    path = Path(tempfile.mkdtemp(prefix="rekindle-crash-", dir="/dev/shm" if os.path.isdir("/dev/shm") else None))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


_mine: Explorer | None = None
"""A worker's explorer: it remembers what it has looked at. What others have looked at it may look at again."""


def _begin(path: Path, how: str) -> None:
    global _mine
    logging.disable(logging.CRITICAL)
    _mine = explorer_in(path / str(os.getpid()), how)


def _share(how: str, one: Work) -> tuple[str, Counter[str], list[Violation]]:
    assert _mine is not None
    _mine.counts, _mine.violations = Counter(), []
    do(_mine, how, one)
    return one[0], _mine.counts, _mine.violations


def _seen(_: object) -> set[int]:
    time.sleep(0.5)  # so that each worker gets one
    return _mine.seen if _mine is not None else set()


def look_at_all(how: str, workers: int) -> tuple[dict[str, Counter[str]], int, list[Violation]]:
    """Counts by kind of history, different states over all, violations."""
    counts: dict[str, Counter[str]] = {}
    found: list[Violation] = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    with scratch() as path, Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        every = work(how, calls_of(path / "calls"))
        task = bar.add_task("histories", total=len(every))
        context = multiprocessing.get_context("spawn")
        with context.Pool(workers, _begin, (path, how)) as pool:
            for number, (kind, some, wrong) in enumerate(
                pool.imap_unordered(partial(_share, how), every, chunksize=4), 1
            ):
                counts.setdefault(kind, Counter()).update(some)
                found += wrong
                bar.advance(task)
                if bar.disable and number % 200 == 0:
                    states = sum(count["states"] for count in counts.values())
                    click.echo(f"{number} of {len(every)} histories, {states} states, {len(found)} wrong", err=True)
            different = set[int]().union(*pool.imap_unordered(_seen, range(workers), chunksize=1))
    return counts, len(different), found
