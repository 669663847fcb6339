"""What a save costs training: first and later saves of the same state by torch.save, DCP and Rekindle, side by side.

Every contender runs in processes of its own, in turn over several rounds. docs/benchmarks.md tells what is measured,
and how. Linux only.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
import torch
from contender import CONTENDERS, LOADS, Task
from machine import describe, disk_speeds
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from rekindle.snapshot.memory import JobDir

_HERE = Path(__file__).resolve().parent
_LIMIT = 900.0
"""Seconds after which a contender's process counts as hung."""

Runs = dict[str, list[dict[str, Any]]]


class Size(click.ParamType):
    """``1GiB``, ``64MiB``, ``5e8``: a number of bytes."""

    name = "size"
    _UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "KI": 2**10, "MI": 2**20, "GI": 2**30}

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        match = re.fullmatch(r"([\d.]+(?:e\d+)?)\s*([KMG]I?)?B?", value.strip(), re.IGNORECASE)
        if not match:
            self.fail(f"{value!r} is no size: write 1GiB, 64MiB or a number of bytes", param, ctx)
        return int(float(match[1]) * self._UNITS[(match[2] or "").upper()])


@click.command(context_settings={"show_default": True}, help=__doc__)
@click.option("--size", type=Size(), default="1GiB", help="Bytes of the state: a model and what AdamW keeps of it.")
@click.option("--rounds", type=click.IntRange(1), default=3, help="Times that every contender has its turn.")
@click.option("--saves", type=click.IntRange(1), default=3, help="Saves in each turn after the first one.")
@click.option("--compute", type=click.FloatRange(0.001), default=0.2, help="Seconds of work between save and update.")
@click.option("--threads", type=click.IntRange(1), default=torch.get_num_threads, help="Threads that torch may use.")
@click.option(
    "--settle", type=click.FloatRange(0), default=10.0, help="Seconds to wait for an idle machine before a save."
)
@click.option("--load/--no-load", default=True, help="Measure loading too, and verify what was saved by it.")
@click.option(
    "--dir",
    "directory",
    type=click.Path(file_okay=False, path_type=Path),
    default=_HERE / "out",
    help="Where checkpoints go, into a temporary directory; a real disk, not tmpfs.",
    show_default="bench/out",
)
@click.option(
    "--json",
    "output",
    type=click.Path(dir_okay=False, path_type=Path),
    default=_HERE / "out" / "stall.json",
    help="File for every sample and the machine's description.",
    show_default="bench/out/stall.json",
)
def main(
    size: int,
    rounds: int,
    saves: int,
    compute: float,
    threads: int,
    settle: float,
    load: bool,
    directory: Path,
    output: Path,
) -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that a killed run tidies up too
    runs: Runs = defaultdict(list)
    loads: Runs = defaultdict(list)
    disk: list[dict[str, float | None]] = []
    busy: list[float] = []
    with _scratch(directory) as (target, memory), _progress() as progress:
        machine = describe(target, memory, threads)
        turns = len(CONTENDERS) + 1 + (len(LOADS) if load else 0)
        bar = progress.add_task("", total=rounds * turns)
        for number in range(rounds):
            progress.update(bar, description=f"round {number + 1}: disk", advance=1)
            disk.append(disk_speeds(target, size))
            busy.append(os.getloadavg()[0])
            names = list(CONTENDERS)
            for name in names[number % len(names) :] + names[: number % len(names)]:  # nobody is always the first
                root = target / str(names.index(name))
                task = Task(name, None, size, saves, compute, threads, settle, str(root), str(target / "result.json"))
                progress.update(bar, description=f"round {number + 1}: {name}", advance=1)
                runs[name].append(_run(task, memory / "memory"))
                last = runs[name][-1]["samples"][-1]["fingerprint"]
                for way in [way for way, (writer, _) in LOADS.items() if load and writer == name]:
                    progress.update(bar, description=f"round {number + 1}: {way}", advance=1)
                    place = "empty" if way == "rekindle, storage" else "memory"
                    loads[way].append(_run(Task(**{**asdict(task), "load": way, "fingerprint": last}), memory / place))
                _stop_agents(memory)
                shutil.rmtree(root)
    summary = {
        "saves": {name: _summary(runs[name]) for name in runs},
        "loads": {way: _load_summary(loads[way]) for way in loads},
        "disk_gb_per_s": _disk_summary(disk, size),
    }
    settings = {"size": size, "rounds": rounds, "saves": saves, "compute": compute}
    document = {"machine": machine, "settings": settings, "summary": summary}
    document["raw"] = {"saves": runs, "loads": loads, "disk_seconds": disk, "load_average": busy}
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(document, indent=1) + "\n")
    _print(machine, settings, summary, runs)


# -- running ------------------------------------------------------------------------------------------------------


@contextmanager
def _scratch(directory: Path) -> Iterator[tuple[Path, Path]]:
    """A directory on the disk and one in memory, both gone afterwards, and with them the agents that serve there."""
    directory.mkdir(parents=True, exist_ok=True)
    base = os.environ.get("REKINDLE_MEMORY", "/dev/shm")
    with (
        tempfile.TemporaryDirectory(prefix="stall-", dir=directory) as target,
        tempfile.TemporaryDirectory(prefix="stall-", dir=base, ignore_cleanup_errors=True) as memory,
    ):
        try:
            yield Path(target), Path(memory)
        finally:
            _stop_agents(Path(memory))


def _run(task: Task, memory: Path) -> dict[str, Any]:
    """One contender's process, from start to end."""
    command = [sys.executable, str(_HERE / "contender.py"), json.dumps(asdict(task))]
    result = Path(task.result)
    result.unlink(missing_ok=True)
    done = subprocess.run(
        command,
        env={**os.environ, "REKINDLE_MEMORY": str(memory)},
        capture_output=True,
        text=True,
        timeout=_LIMIT,
        check=False,
    )
    if done.returncode not in (0, -signal.SIGKILL) or not result.exists():
        raise click.ClickException(f"{task.load or task.contender} ended with {done.returncode}:\n{done.stderr}")
    return json.loads(result.read_bytes())


def _stop_agents(memory: Path) -> None:
    """End the agents of all jobs under ``memory`` and give their memory back."""
    for base in memory.glob("*/rekindle-*"):
        for job in base.iterdir():
            pid = JobDir(job).agent()
            deadline = time.monotonic() + 10
            while pid is not None and time.monotonic() < deadline:
                try:
                    os.kill(pid, signal.SIGTERM)
                except ProcessLookupError:
                    break
                time.sleep(0.05)
                pid = JobDir(job).agent()
        shutil.rmtree(base, ignore_errors=True)


def _progress() -> Progress:
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    return Progress(*columns, console=Console(stderr=True))


# -- telling ------------------------------------------------------------------------------------------------------


def _summary(turns: list[dict[str, Any]]) -> dict[str, float]:
    """Medians over all rounds. ``first_*`` is of the first saves, ``later_*`` of all others."""
    first = [turn["samples"][0] for turn in turns]
    later = [sample for turn in turns for sample in turn["samples"][1:]]
    found = {"setup": statistics.median(turn["setup"] for turn in turns)}
    for when, samples in (("first", first), ("later", later)):
        for key in ("call", "wait", "stall", "step_longer", "durable", "lost"):
            found[f"{when}_{key}"] = statistics.median(sample[key] for sample in samples)
        found[f"{when}_stall_per_copy"] = statistics.median(sample["stall"] / sample["floor"] for sample in samples)
        found[f"{when}_stall_max"] = max(sample["stall"] for sample in samples)
    found["floor"] = statistics.median(sample["floor"] for sample in first + later)
    for key in ("peak", "shared"):
        found[f"memory_{key}"] = statistics.median(turn["memory"][key] for turn in turns)
    return found


def _load_summary(turns: list[dict[str, float]]) -> dict[str, float]:
    found = {key: statistics.median(turn[key] for turn in turns) for key in ("cold", "warm", "floor")}
    return {**found, "warm_per_copy": statistics.median(turn["warm"] / turn["floor"] for turn in turns)}


def _disk_summary(disk: list[dict[str, float | None]], size: int) -> dict[str, float]:
    seconds = {key: [s for s in (one[key] for one in disk) if s is not None] for key in disk[0]}
    return {key: size / 1e9 / statistics.median(values) for key, values in seconds.items() if values}


def _print(machine: dict[str, Any], settings: dict[str, Any], summary: dict[str, Any], runs: Runs) -> None:
    console = Console(width=None if sys.stdout.isatty() else 150)
    state = next(iter(runs.values()))[0]
    floor = statistics.median(s["floor"] for s in summary["saves"].values())
    disk = ", ".join(f"{key.replace('_', ' ')} {value:.2f}" for key, value in summary["disk_gb_per_s"].items())
    table = Table(title="What a save costs", caption_justify="left")
    table.caption = (
        f"{state['state_bytes'] / 2**20:,.0f} MiB in {state['tensors']} tensors; medians of {settings['rounds']} first "
        f"and {settings['rounds'] * settings['saves']} later saves. {machine['cpu']}, {machine['cores']} cores, "
        f"{machine['threads']} threads, torch {machine['torch']}, checkpoints on {machine['target_file_system']}, "
        f"memory on {machine['memory_file_system']}.\n"
        f"One copy of the state into memory that is already there: {floor * 1e3:,.0f} ms. Disk, GB/s: {disk}."
    )
    table.add_column("contender", no_wrap=True)
    for title in (
        *("stall, ms\nfirst", "\nlater", "of it\nwait", "in copies\nfirst", "\nlater", "step longer\nby, ms"),
        *("durable, s\nfirst", "\nlater", "training\nlost, s", "memory\nMiB", "of it\nshared"),
    ):
        table.add_column(title, justify="right")
    for name, s in summary["saves"].items():
        milliseconds = (s[key] * 1e3 for key in ("first_stall", "later_stall", "later_wait"))
        table.add_row(
            name,
            *(f"{value:,.0f}" for value in milliseconds),
            *(f"{s[key]:.2f}" for key in ("first_stall_per_copy", "later_stall_per_copy")),
            f"{s['later_step_longer'] * 1e3:,.0f}",
            *(f"{s[key]:.2f}" for key in ("first_durable", "later_durable", "later_lost")),
            *(f"{s[key] / 2**20:,.0f}" for key in ("memory_peak", "memory_shared")),
        )
    console.print(table)
    if summary["loads"]:
        table = Table("way", title="What a load takes, every one verified")
        for title in ("cold, ms", "warm, ms", "in copies"):
            table.add_column(title, justify="right")
        for way, s in summary["loads"].items():
            table.add_row(way, f"{s['cold'] * 1e3:,.0f}", f"{s['warm'] * 1e3:,.0f}", f"{s['warm_per_copy']:.2f}")
        console.print(table)
    if machine["target_file_system"] == "tmpfs":
        console.print("[bold]The target is memory, not a disk: the figures for durability mean nothing.[/]")


if __name__ == "__main__":
    main()
