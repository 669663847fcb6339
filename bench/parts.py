"""The parts of the benchmark: which workers run, in which order, and what each of them found."""

from __future__ import annotations

import os
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from machine import free_memory
from registry import CONTENDERS, LOADS, LOOP, absent, is_peer
from scratch import Failed, Scratch
from sizes import GIB, MIB
from task import Task

__all__ = ["PARTS", "Parts", "Plan", "misfit"]

PARTS = ("stall", "load", "loop", "drain", "growth")

Runs = dict[str, list[dict[str, Any]]]


@dataclass(frozen=True)
class Plan:
    """The amount of everything that a run does."""

    rounds: int = 3
    """Times that every contender has its turn."""
    saves: int = 3
    """Saves in each turn after the first one."""
    windows: int = 2
    """Pairs of windows in each turn of the loop."""
    steps: int = 6
    """Steps in a window."""
    compute: float = 0.2
    """Seconds of forward and backward in a step, at least."""
    threads: int = 1
    settle: float = 10.0
    """Seconds to wait for an idle machine before a measurement, at most."""
    contenders: tuple[str, ...] = tuple(CONTENDERS)
    loop: tuple[str, ...] = tuple(LOOP)
    """Contenders that train with a save at every step."""
    tensors: tuple[int, ...] = (10, 100, 1_000, 10_000, 100_000)
    tensor_bytes: tuple[int, ...] = (16 * MIB, 512 * MIB)
    bytes: tuple[int, ...] = tuple(64 * MIB * 2**n for n in range(7))
    ranks: tuple[int, ...] = (1, 2, 4, 8)
    rank_bytes: int = 512 * MIB
    history: int = 1_000
    repeats: int = 7
    """Saves at each point of growth."""


SMOKE = Plan(
    rounds=1,
    saves=2,
    windows=2,
    steps=3,
    compute=0.02,
    settle=0.0,
    contenders=tuple(name for name in CONTENDERS if name != "dcp.async_save"),  # the one with a kept stager does more
    loop=("Rekindle, snapshots only",),
    tensors=(10, 1_000),
    tensor_bytes=(4 * MIB,),
    bytes=(),
    ranks=(2,),
    rank_bytes=16 * MIB,
    history=20,
    repeats=3,
)


def misfit(size: int, target: Path, memory: Path) -> str | None:
    """Why a state of ``size`` bytes can't be measured here; None when it can.

    Training holds the state and gradients of a third of it; Rekindle two snapshots, and a third while one is drained;
    Orbax nearly as much. The disk holds two checkpoints, the one being written, and the file that fio works with.
    """
    for what, needed, there in (
        ("memory", 4.5 * size + GIB, free_memory()),
        (f"{memory}", 3.1 * size, shutil.disk_usage(memory).free),
        (f"{target}", 4.2 * size, shutil.disk_usage(target).free),
    ):
        if needed > there:
            return f"it takes {needed / GIB:.1f} GiB of {what}, and {there / GIB:.1f} GiB are free"
    return None


@dataclass
class Parts:
    """Runs parts in ``place``. ``tell`` is called with what comes next; ``skipped`` gathers who can't take part."""

    place: Scratch
    plan: Plan
    tell: Callable[[str], None]
    skipped: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in CONTENDERS:
            reason = absent(name)
            if reason:
                self.skipped[name] = reason

    def calibrate(self, size: int) -> dict[str, Any]:
        """The batch of everybody's steps at this size."""
        self.tell("calibrating")
        found: dict[str, Any] = self.place.run(self._task("calibrate", size=size, more={"compute": self.plan.compute}))
        return found

    def _task(self, part: str, name: str = "", **more: Any) -> Task:
        root = str(self.place.target / "root")
        return Task(part, name, threads=self.plan.threads, settle=self.plan.settle, target=root, **more)

    @contextmanager
    def _turn(self, name: str) -> Iterator[None]:
        """All that one contender leaves behind goes; a peer that fails is left out from here on."""
        try:
            yield
        except Failed as error:
            if name not in LOOP | CONTENDERS or not is_peer(name):
                raise Failed(f"{name} {error}") from None
            self.skipped[name] = str(error).strip().splitlines()[-1]
        finally:
            self.place.stop_agents()
            shutil.rmtree(self.place.target / "root", ignore_errors=True)

    def _turns(self, names: tuple[str, ...], what: str) -> Iterator[str]:
        """Everybody once in every round, another one first each time."""
        for number in range(self.plan.rounds):
            shift = number % len(names)
            for name in names[shift:] + names[:shift]:
                if name not in self.skipped:
                    self.tell(f"{what}, round {number + 1}: {name}")
                    yield name

    def saves(self, size: int, batch: int, load: bool) -> tuple[Runs, Runs]:
        """Single saves of everybody, and loads of what each has saved last."""
        saves: Runs = defaultdict(list)
        loads: Runs = defaultdict(list)
        for name in self._turns(self.plan.contenders, "stall"):
            with self._turn(name):
                task = self._task("saves", name, size=size, batch=batch, count=self.plan.saves)
                found = self.place.run(task)
                last = found["samples"][-1]["fingerprint"]
                for way in [way for way, (writer, *_) in LOADS.items() if load and writer == name]:
                    self.tell(f"load: {way}")
                    where = "empty" if way == "Rekindle, storage" else "memory"
                    task = replace(task, part="load", name=way, fingerprint=last)
                    loads[way].append(self.place.run(task, where))
                saves[name].append(found)
        return saves, loads

    def loop(self, size: int, batch: int) -> Runs:
        """Training with a save at every step."""
        runs: Runs = defaultdict(list)
        for name in self._turns(self.plan.loop, "loop"):
            more = {"steps": self.plan.steps, "memory": str(self.place.memory / "memory")}
            task = self._task("loop", name, size=size, batch=batch, count=self.plan.windows, more=more)
            with self._turn(name):
                runs[name].append(self.place.run(task))
        return runs

    def drain(self, size: int, batch: int) -> list[dict[str, Any]]:
        """Rekindle's drain alone, beside the disk."""
        runs = []
        for number in range(self.plan.rounds):
            self.tell(f"drain, round {number + 1}")
            with self._turn("drain"):
                runs.append(self.place.run(self._task("drain", size=size, batch=batch, count=self.plan.saves)))
        return runs

    def growth(self) -> dict[str, Any]:
        """Cost over tensors, bytes, ranks and history."""
        plan = self.plan
        found: dict[str, Any] = {"tensors": [], "bytes": [], "ranks": []}
        for size in plan.tensor_bytes:
            self.tell(f"growth: tensors, {size // MIB} MiB")
            task = self._task("tensors", size=size, count=plan.repeats, more={"counts": plan.tensors})
            with self._turn("growth"):
                found["tensors"].append(self.place.run(task))
        for size in plan.bytes:
            reason = misfit(size, self.place.target, self.place.memory)
            if reason:
                self.skipped[f"growth: {size // MIB} MiB"] = reason
                continue
            self.tell(f"growth: {size // MIB} MiB")
            with self._turn("growth"):
                found["bytes"].append(self.place.run(self._task("bytes", size=size, count=plan.repeats)))
        for world in plan.ranks:
            self.tell(f"growth: {world} ranks")
            threads = max(1, (os.cpu_count() or 1) // world)
            task = self._task("ranks", size=plan.rank_bytes, count=plan.repeats, more={"world": world})
            with self._turn("growth"):
                found["ranks"].append(self.place.run_ranks(replace(task, threads=threads), world))
        self.tell(f"growth: {plan.history} saves")
        with self._turn("growth"):
            found["history"] = self.place.run(self._task("history", size=MIB, count=plan.history))
        return found

    def turns(self, parts: tuple[str, ...], sizes: int) -> int:
        """Counts the calls of ``tell`` in a run in which no worker fails."""
        saving = [name for name in self.plan.contenders if name not in self.skipped]
        each = 1
        if "stall" in parts or "load" in parts:
            each += self.plan.rounds * len(saving)
        if "load" in parts:
            each += self.plan.rounds * sum(load.writer in saving for load in LOADS.values())
        if "loop" in parts:
            each += self.plan.rounds * sum(name not in self.skipped for name in self.plan.loop)
        if "drain" in parts:
            each += self.plan.rounds
        plan = self.plan
        growth = len(plan.tensor_bytes) + len(plan.bytes) + len(plan.ranks) + 1
        return sizes * each + growth * ("growth" in parts)
