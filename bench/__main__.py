"""Measures the cost of saving and loading, side by side: Rekindle, torch, and others that are installed.

Prints tables, writes every sample as JSON, and draws plots. docs/benchmarks.md tells what is measured, and how.
Linux only.
"""

from __future__ import annotations

import importlib.metadata
import json
import signal
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
import torch
from checks import check
from machine import describe
from parts import PARTS, SMOKE, Parts, Plan, misfit
from report import console_tables, rewrite, tables
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from scratch import Failed, Scratch, scratch
from sizes import GIB, MIB, Size
from summary import reach, reach_growth, summarize, summarize_growth

_HERE = Path(__file__).resolve().parent
_DOCS = _HERE.parent / "docs"
_PEERS = ("torchsnapshot", "dlrover", "orbax-checkpoint", "jax")


@click.command(context_settings={"show_default": True}, help=__doc__)
@click.option("--size", "sizes", type=Size(), multiple=True, default=["1GiB"], help="Bytes of the state. Repeatable.")
@click.option(
    "--part", "parts", type=click.Choice(PARTS), multiple=True, default=PARTS, help="What to measure. Repeatable."
)
@click.option("--rounds", type=click.IntRange(1), default=Plan.rounds, help="Times that every contender has its turn.")
@click.option("--saves", type=click.IntRange(1), default=Plan.saves, help="Saves in each turn after the first one.")
@click.option(
    "--compute", type=click.FloatRange(0.001), default=Plan.compute, help="Seconds of a step's forward and backward."
)
@click.option("--threads", type=click.IntRange(1), default=torch.get_num_threads, help="Threads that torch may use.")
@click.option("--settle", type=click.FloatRange(0), default=Plan.settle, help="Seconds to wait for an idle machine.")
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
    default=_HERE / "out" / "bench.json",
    help="File for every sample and the machine's description.",
    show_default="bench/out/bench.json",
)
@click.option("--docs", is_flag=True, help="Put tables and plots into docs/benchmarks.md.")
@click.option("--smoke", is_flag=True, help="A quick run of all parts at 64 MiB, which checks rather than measures.")
def main(
    sizes: tuple[int, ...],
    parts: tuple[str, ...],
    rounds: int,
    saves: int,
    compute: float,
    threads: int,
    settle: float,
    directory: Path,
    output: Path,
    docs: bool,
    smoke: bool,
) -> None:
    if smoke and docs:
        raise click.UsageError("--smoke gives no figures worth a --docs")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that a killed run tidies up too
    plan = Plan(rounds=rounds, saves=saves, compute=compute, threads=threads, settle=settle)
    if smoke:
        sizes, plan = (64 * MIB,), SMOKE
    with scratch(directory) as place:
        document = _measure(place, plan, sizes, parts)
    rows = {size: reach(found["summary"]) for size, found in document["sizes"].items()}
    if document["growth"]:
        rows["growth"] = reach_growth(document["growth"]["summary"])
    document["reach"] = {size: [row._asdict() for row in found] for size, found in rows.items()}
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(document, indent=1) + "\n")
    made = list(tables(document, rows))
    console = Console(width=None if sys.stdout.isatty() else 180)
    console_tables(console, document, made)
    plots = _plots(console, document, _DOCS / "img" if docs else output.parent)
    if docs:
        for name in rewrite(_DOCS / "benchmarks.md", document, made, plots):
            console.print(f"docs/benchmarks.md has no place for {name!r}")
    if "failed" in document:  # what was measured before is not lost
        raise click.ClickException(document["failed"])
    if smoke:
        wrong = check(document, parts)
        if wrong:
            raise click.ClickException("; ".join(wrong))
        console.print("all checks passed")


def _measure(place: Scratch, plan: Plan, sizes: tuple[int, ...], names: tuple[str, ...]) -> dict[str, Any]:
    """Everything that was asked for, as it goes into the JSON file."""
    machine = describe(place.target, place.memory, plan.threads)
    machine["peers"] = {name: importlib.metadata.version(name) for name in _PEERS if _installed(name)}
    settings = {**asdict(plan), "parts": names, "command": " ".join(_public(sys.argv[1:]))}
    document: dict[str, Any] = {"machine": machine, "settings": settings, "sizes": {}, "growth": {}}
    with _progress() as progress:
        bar = progress.add_task("", total=None)
        parts = Parts(place, plan, lambda what: progress.update(bar, description=what, advance=1))
        document["skipped"] = parts.skipped
        for name, reason in parts.skipped.items():
            progress.console.print(f"left out: {name}: {reason}", markup=False)
        progress.update(bar, total=parts.turns(names, len(sizes)))
        try:
            for size in sizes:
                _measure_size(parts, size, names, document)
            if "growth" in names:
                raw = parts.growth()
                document["growth"] = {"summary": summarize_growth(raw), "raw": raw}
            progress.update(bar, description="done")
        except Failed as error:
            document["failed"] = str(error)
    return document


def _measure_size(parts: Parts, size: int, names: tuple[str, ...], document: dict[str, Any]) -> None:
    label = f"{size / GIB:g} GiB" if size >= GIB else f"{size / MIB:g} MiB"
    reason = misfit(size, parts.place.target, parts.place.memory)
    if reason:
        parts.skipped[label] = reason
        parts.tell(f"left out: {label}: {reason}")
        return
    calibration = parts.calibrate(size)
    batch, raw = calibration["batch"], {}
    if "stall" in names or "load" in names:
        raw["saves"], raw["loads"] = parts.saves(size, batch, "load" in names)
    if "loop" in names:
        raw["loop"] = parts.loop(size, batch)
    if "drain" in names:
        raw["drain"] = parts.drain(size, batch)
    document["sizes"][label] = {"bytes": size, "calibration": calibration, "summary": summarize(raw), "raw": raw}


def _public(arguments: list[str]) -> list[str]:
    """The command line without paths, which are nobody's business."""
    kept, skip = [], False
    for argument in arguments:
        if skip or argument.split("=")[0] in ("--dir", "--json"):
            skip = not skip and "=" not in argument
        elif argument != "--docs":
            kept.append(argument)
    return kept


def _installed(name: str) -> bool:
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _progress() -> Progress:
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    return Progress(*columns, console=Console(stderr=True))


def _plots(console: Console, document: dict[str, Any], directory: Path) -> list[Path]:
    try:
        from plots import draw
    except ImportError:
        console.print("no plots: matplotlib is not installed (pip install -e '.[bench]')", markup=False)
        return []
    made = draw(document, directory)
    console.print(f"plots: {', '.join(path.name for path in made)}", markup=False)
    return made


if __name__ == "__main__":
    main()
