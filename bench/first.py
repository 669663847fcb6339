"""The first steps of a job on fresh memory, beside ``dcp.async_save``: ``python bench/first.py``.

Training alone, with Rekindle, and with ``dcp.async_save`` take turns, each in a new process. Linux only.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import statistics
import sys
from pathlib import Path
from typing import Any

import click
from machine import describe
from rich.console import Console
from rich.table import Table
from scratch import scratch
from sizes import GIB, MIB, Size
from start import FIRST
from task import Task

_HERE = Path(__file__).resolve().parent
_SHARE = 0.1
"""Goal: longest wait beside the first call of ``dcp.async_save``."""

Runs = dict[str, list[dict[str, Any]]]


@click.command(context_settings={"show_default": True}, help=__doc__)
@click.option("--size", type=Size(), default="1GiB", help="Bytes of the state.")
@click.option("--steps", type=click.IntRange(2), default=10, help="Steps of each process.")
@click.option("--rounds", type=click.IntRange(1), default=3, help="Times that each has its turn.")
@click.option("--compute", type=click.FloatRange(0.001), default=0.5, help="Seconds of a step's forward and backward.")
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
def main(
    size: int,
    steps: int,
    rounds: int,
    compute: float,
    threads: int,
    settle: float,
    directory: Path,
    output: Path | None,
) -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    runs: Runs = {name: [] for name in FIRST}
    with scratch(directory) as place:
        machine = describe(place.target, place.memory, threads)
        machine["load"] = os.getloadavg()
        common = {"size": size, "threads": threads, "target": str(place.target / "root")}
        batch = place.run(Task("calibrate", **common, more={"compute": compute}))["batch"]
        for _ in range(rounds):
            for name in FIRST:
                task = Task("first", name, **common, batch=batch, count=steps, settle=settle)
                try:
                    runs[name].append(place.run(task))
                finally:
                    place.stop_agents()
                    shutil.rmtree(place.target / "root", ignore_errors=True)
    document = {"machine": machine, "size": size, "batch": batch, "runs": runs}
    if output is not None:
        output.write_text(json.dumps(document, indent=1) + "\n")
    _show(runs, size)


def _show(runs: Runs, size: int) -> None:
    table = Table(*("", "longest wait, ms", "in units of dcp's first call", "steps left out", "speed meanwhile"))
    alone = [statistics.median(seconds) for seconds in zip(*map(_seconds, runs["training alone"]), strict=True)]
    first = statistics.median(run["samples"][0]["call"] for run in runs["dcp.async_save"])
    for name, found in runs.items():
        longest = statistics.median(max(s["call"] + s["wait"] for s in run["samples"]) for run in found)
        left = statistics.median(run.get("left_out", 0) for run in found)
        speed = statistics.median(_speed(run, alone) for run in found)
        table.add_row(name, f"{longest * 1e3:.1f}", f"{longest / first:.3f}", f"{left:g}", f"{speed:.2f}")
    label = f"{size / GIB:g} GiB" if size >= GIB else f"{size / MIB:g} MiB"
    console = Console(width=None if sys.stdout.isatty() else 140)
    console.print(f"the first {len(alone)} steps of a state of {label}, medians; goal: {_SHARE}", table)


def _seconds(run: dict[str, Any]) -> list[float]:
    return [sample["seconds"] for sample in run["samples"]]


def _speed(run: dict[str, Any], alone: list[float]) -> float:
    """Speed beside that of training alone: of the steps in which memory was made or, where there is none, of all."""
    pairs = list(zip(alone, run["samples"], strict=True))
    counted = [(base, sample) for base, sample in pairs if sample["making"]] or pairs
    return sum(base for base, _ in counted) / sum(sample["seconds"] for _, sample in counted)


if __name__ == "__main__":
    main()
