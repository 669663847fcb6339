"""How soon a new job is protected, and what that takes from training: ``python bench/ready.py``. Linux only.

Three jobs take turns, each in a new process on memory that nobody has touched: training alone, with memory made for
snapshots but none taken, and with a snapshot at each step. Exits with 1 when a bound is missed or nothing was measured.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
from machine import describe
from ready_job import JOBS
from report import Table, console_table, markdown, put_blocks
from rich.console import Console
from scratch import Scratch, scratch
from sizes import GIB, Size
from task import Task

_HERE = Path(__file__).resolve().parent
_SOON, _FLOORS = 3.0, 2.0
"""Bound in which each slot is ready: so many seconds, and so many times the floor of the bytes made until then."""
_LOST = 1.5
"""Bound of the training time that is lost while memory is made, in floors of all bytes made."""
_SLOTS = 3

Run = dict[str, Any]


@click.command(context_settings={"show_default": True}, help=__doc__)
@click.option("--size", type=Size(), default="1GiB", help="Bytes of the state.")
@click.option("--steps", type=click.IntRange(2), default=30, help="Steps of each job.")
@click.option("--compute", type=click.FloatRange(0.001), default=1.5, help="Seconds of a step's forward and backward.")
@click.option("--runs", type=click.IntRange(1), default=3, help="Times that each job has its turn.")
@click.option("--load", type=click.IntRange(0), default=0, help="Busy loops beside the jobs.")
@click.option("--threads", type=click.IntRange(1), default=os.cpu_count() or 1, help="Threads that torch may use.")
@click.option("--settle", type=click.FloatRange(0), default=10.0, help="Seconds to wait for an idle machine.")
@click.option(
    "--dir",
    "directory",
    type=click.Path(file_okay=False, path_type=Path),
    default=_HERE / "out",
    help="Where checkpoints go, into a temporary directory.",
    show_default="bench/out",
)
@click.option("--json", "output", type=click.Path(dir_okay=False, path_type=Path), help="File for every sample.")
@click.option("--docs", is_flag=True, help="Put the table into docs/benchmarks.md.")
def main(
    size: int, steps: int, runs: int, load: int, directory: Path, output: Path | None, docs: bool, **how: Any
) -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    with scratch(directory) as place:
        machine = describe(place.target, place.memory, how["threads"])
        common = {"size": size, "threads": how["threads"], "target": str(place.target / "root")}
        batch = place.run(Task("calibrate", **common, more={"compute": how["compute"]}))["batch"]
        floor = place.run(Task("floor", size=size, count=5))["seconds"]
        task = Task("ready", **common, batch=batch, count=steps, settle=0.0 if load else how["settle"])
        found = _measure(place, task, runs, load)
    rows = [_judge(run, floor) for run in found]
    conditions = (
        f"{machine['date'][:10]}: {machine['cpu']}, {machine['cores']} cores, Linux {machine['kernel']}; "
        f"{size / GIB:g} GiB, {steps} steps of {how['compute']:g} s, {load} busy loops beside; floor: {floor:.2f} s of "
        "a core for each slot"
    )
    if output is not None:
        output.write_text(json.dumps({"conditions": conditions, "floor": floor, "runs": found}, indent=1) + "\n")
    table, missed = _tabulate(rows, floor), _missed(rows, floor)
    console = Console(width=None if sys.stdout.isatty() else 140)
    console_table(console, table)
    console.print(conditions, markup=False)
    if docs:
        name = "ready loaded" if load else "ready"
        for gone in put_blocks(_HERE.parent / "docs" / "benchmarks.md", {name: markdown(table) + "\n\n" + conditions}):
            click.echo(f"docs/benchmarks.md has no place for {gone!r}")
    if missed:
        raise click.ClickException("; ".join(missed))


def _measure(place: Scratch, task: Task, runs: int, load: int) -> list[dict[str, Run]]:
    found = []
    with _busy(load):
        for number in range(runs):
            run = {}
            names = list(JOBS)
            for name in names[number % len(names) :] + names[: number % len(names)]:  # nobody always comes first
                try:
                    run[name] = place.run(Task(**{**vars(task), "name": name}))
                finally:
                    place.stop_agents()
                    shutil.rmtree(task.target, ignore_errors=True)
            found.append(run)
    return found


@contextmanager
def _busy(count: int) -> Iterator[None]:
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def _judge(run: dict[str, Run], floor: float) -> Run:
    saved, made, alone = run["snapshots"], run["memory is made"], run["training alone"]
    if not saved["saves"] or not saved["in_memory"] or made["saves"]:
        raise click.ClickException("no snapshot was made, or some where there should be none: nothing was measured")
    if len(saved["ready"]) < _SLOTS or len(made["ready"]) < _SLOTS:
        raise click.ClickException(f"{len(saved['ready'])} slots were made, not {_SLOTS}")
    first = next(step for step, before in _with_before(saved["steps"]) if step["left_out"] == before)
    due = _SOON + _FLOORS * floor
    late = sum(step["left_out"] - before for step, before in _with_before(saved["steps"]) if step["ended"] > due)
    begun = 1 + sum(step["ended"] < made["ready"][_SLOTS - 1] for step in made["steps"])
    if begun > len(made["steps"]) // 2:
        raise click.ClickException("memory was made for too many of the steps: there is nothing to compare them with")
    return {
        "ready": saved["ready"][:_SLOTS],
        "first": first["ended"],
        "left_out": saved["steps"][-1]["left_out"],
        "late": late,
        "lost": _longer(made["steps"], begun) - _longer(alone["steps"], begun),
    }


def _longer(steps: list[Run], count: int) -> float:
    """Seconds by which the first ``count`` steps are longer than as many of the others.

    A machine's speed changes from job to job by more than what is to be seen.
    """
    others = statistics.median(step["seconds"] for step in steps[count:])
    return sum(step["seconds"] - others for step in steps[:count])


def _with_before(steps: list[Run]) -> Iterator[tuple[Run, int]]:
    """Each step, and how many were left out before it."""
    yield from zip(steps, [0, *(step["left_out"] for step in steps)], strict=False)


def _tabulate(rows: list[Run], floor: float) -> Table:
    figures = [
        ("first slot ready, s", [row["ready"][0] for row in rows], _SOON + _FLOORS * floor),
        ("second slot ready, s", [row["ready"][1] for row in rows], _SOON + 2 * _FLOORS * floor),
        ("third slot ready, s", [row["ready"][2] for row in rows], _SOON + 3 * _FLOORS * floor),
        ("first snapshot at the end of a step, s", [row["first"] for row in rows], None),
        ("steps left out", [row["left_out"] for row in rows], None),
        ("training time lost meanwhile, s", [row["lost"] for row in rows], _LOST * _SLOTS * floor),
    ]
    columns = ["", "median", "least", "most", "bound"]
    made = [
        [
            name,
            f"{statistics.median(found):.2f}",
            f"{min(found):.2f}",
            f"{max(found):.2f}",
            f"{bound:.2f}" if bound else "",
        ]
        for name, found, bound in figures
    ]
    return Table("ready", f"Until a new job is protected: {len(rows)} run(s)", columns, made)


def _missed(rows: list[Run], floor: float) -> list[str]:
    """Bounds that were missed: of slots and snapshots in any run, of the time lost by the median, as runs vary."""
    found = []
    for number in range(_SLOTS):
        most, bound = max(row["ready"][number] for row in rows), _SOON + (number + 1) * _FLOORS * floor
        if most > bound:
            found.append(f"slot {number + 1} was ready after {most:.2f} s, the bound is {bound:.2f} s")
    late = max(row["late"] for row in rows)
    if late:
        found.append(f"{late} step(s) that ended after the bound had no snapshot")
    lost = statistics.median(row["lost"] for row in rows)
    if lost > _LOST * _SLOTS * floor:
        found.append(f"training lost {lost:.2f} s, the bound is {_LOST * _SLOTS * floor:.2f} s")
    return found


if __name__ == "__main__":
    main()
