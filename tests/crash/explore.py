"""Histories of operations, every state that a power cut may leave at any moment of them, and what is wrong with it."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

import xxhash

from rekindle.format.receipt import checksum
from tests.crash.disk import Effort, Mark, Op, Tree
from tests.crash.jobs import OPERATIONS, Place, Run, reports
from tests.crash.judge import Promise, come_back, drained_again, judge
from tests.crash.recorder import Recorder

__all__ = ["FULL", "QUICK", "Explorer", "Violation", "sequences"]

QUICK = Effort(subsets=4, every_block=False)
FULL = Effort(subsets=8, every_block=True)
_SECOND = Effort(subsets=0, every_block=False)

Step = tuple[str, int | None]
"""An operation, and the call at which its process dies."""


@dataclass(frozen=True)
class Violation:
    """A state in which something is wrong."""

    history: str
    crash: str
    state: str
    tree: tuple[str, ...]
    wrong: str

    def __str__(self) -> str:
        lines = [self.wrong, f"  history: {self.history}", f"  power cut: {self.crash}", f"  {self.state}"]
        return "\n".join([*lines, *(f"    {path}" for path in self.tree)])


@dataclass
class Explorer:
    """Looks at each state once, whatever the histories by which it comes about."""

    path: Path
    effort: Effort = QUICK
    second_every: int = 0
    """Of every so many states the product's return is recorded and cut short too; 0 for none."""
    mutate: Callable[[Recorder], None] = lambda recorder: None
    """Breaks something, to see that it is found."""
    wanted: str = ""
    """Words of the violation with which ``explore`` ends; empty to look at all states."""
    counts: Counter[str] = field(default_factory=Counter)
    """Of ``histories``; of ``points`` at which the power went; of ``reached`` states, those included that had been
    looked at before; of ``states`` that were looked at; of ``bounded`` points, that had more states than were looked
    at; of ``second points`` and ``second states`` at and after a second power cut."""
    violations: list[Violation] = field(default_factory=list)
    seen: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.place = Place(self.path)

    def record(self, steps: Sequence[Step], act: Callable[[Run], None] | None = None) -> tuple[Run, int]:
        """Do these operations one after the other, then ``act``. The run, and how long its log was before the last."""
        self.place.put({})
        run = Run(self.place, Recorder(self.place.world))
        first = 0
        with reports(run.recorder.tell), run.recorder:
            self.mutate(run.recorder)
            for name, die_at in steps:
                first = len(run.recorder.log)
                run.do(name, die_at)
            if act is not None:
                first = len(run.recorder.log)
                run.recorder.begin()
                act(run)
        return run, first

    def explore(self, steps: Sequence[Step], act: Callable[[Run], None] | None = None) -> None:
        """Do so, and look at all that a power cut during the last of them may leave.

        What it may leave during the others belongs to shorter histories.
        """
        run, first = self.record(steps, act)
        names = [name if die_at is None else f"{name} (killed at call {die_at})" for name, die_at in steps]
        history = ", ".join(names + (["two nodes publish at once"] if act is not None else []))
        self.counts["histories"] += 1
        for state, crash, why, promise in self._states(run.recorder, first, Promise(), self.effort):
            self.counts["reached"] += 1
            self._look(state, promise, run, (history, crash, why))
            if self.wanted and any(self.wanted in violation.wrong for violation in self.violations):
                return

    def _states(
        self, recorder: Recorder, first: int, promise: Promise, effort: Effort, kind: str = ""
    ) -> Iterator[tuple[Tree, str, str, Promise]]:
        disk, log = recorder.start, recorder.log
        for number in range(len(log) + 1):
            op: Op | None = log[number - 1] if number else None
            if op is not None:
                disk.apply(op)
            told = promise.told(op.what) if isinstance(op, Mark) else promise
            if number >= first and not (number > first and isinstance(op, Mark) and told == promise):
                self.counts[f"{kind}points"] += 1
                before = disk.bounded
                crash = f"after {op.text!r}, {number} of {len(log)}" if op is not None else "before the first call"
                for tree, why in disk.states(effort, op if number > first else None):
                    yield tree, crash, why, told
                self.counts["bounded"] += disk.bounded > before and not kind
            promise = told

    def _new(self, tree: Tree, promise: Promise) -> bool:
        """Whether nothing like it has been looked at."""
        key = _digest(tree, promise)
        if key in self.seen:
            return False
        self.seen.add(key)
        return True

    def _look(self, tree: Tree, promise: Promise, run: Run, said: tuple[str, str, str]) -> None:
        if not self._new(tree, promise):
            return
        self.counts["states"] += 1
        self._judge(tree, promise, run, said)
        if self.second_every and len(self.seen) % self.second_every == 0:
            self._second(tree, promise, run, said)

    def _judge(self, tree: Tree, promise: Promise, run: Run, said: tuple[str, str, str]) -> None:
        self.place.put(tree)
        problems = list(judge(self.place, promise, run.known, run.exports))
        if run.last and any(path.endswith(".partial") for path in tree):
            self.place.put(tree)
            problems += drained_again(self.place, promise, run.known, run.last)
        shown = tuple(f"{path}{'/' if content is None else f' ({len(content)})'}" for path, content in tree.items())
        self.violations += [Violation(*said, shown, wrong) for wrong in problems]

    def _second(self, tree: Tree, promise: Promise, run: Run, said: tuple[str, str, str]) -> None:
        """The power goes again while the product comes back."""
        self.place.put(tree)
        recorder = Recorder(self.place.world)
        with reports(recorder.tell), recorder:
            come_back(self.place)
        for state, crash, why, promised in self._states(recorder, 1, promise, _SECOND, "second "):
            if self._new(state, promised):
                self.counts["second states"] += 1
                self._judge(state, promised, run, (said[0], f"{said[1]}; again {crash}", f"{said[2]}; {why}"))


def _digest(tree: Tree, promise: Promise) -> int:
    """The same in all processes."""
    names = [f"{path}:{_essence(content)}" for path, content in sorted(tree.items())]
    told = sorted(map(repr, promise.durable)) + sorted(promise.exported)
    return xxhash.xxh3_64_intdigest("\n".join(names + told).encode())


@lru_cache(100_000)
def _essence(content: bytes | None) -> str:
    """A file but for the time of day in it."""
    if content is None:
        return "directory"
    return checksum(re.sub(rb'^{"digest":"[0-9a-f]{16}"|"saved_at":"[^"]*"', b"", content))


def sequences(length: int) -> Iterator[tuple[Step, ...]]:
    """All of up to so many operations."""
    for count in range(1, length + 1):
        for names in itertools.product(OPERATIONS, repeat=count):
            yield tuple((name, None) for name in names)
