"""From a SIGKILL to the first new step, under several launchers: ``python bench/recovery.py``. Linux only.

Launchers take turns at the same training with the same checkpoints: ``rekindle run``, that without warm workers,
torchrun, and NVRx's ``ft_launcher``; torchrun also with torch's own checkpoints. One rank is killed, then all, again
and again. A last run is left alone: every state after every step of the others must be its own, bit for bit.
"""

from __future__ import annotations

import importlib.util
import json
import signal
import statistics
import sys
from pathlib import Path
from typing import Any

import click
from launched import LAUNCHERS, PARTS, Launched
from machine import describe, settle
from report import Table, console_table, markdown, put_blocks
from rich.console import Console
from scratch import Failed, Scratch, scratch

_HERE = Path(__file__).resolve().parent
_DOCS = _HERE.parent / "docs"
_GOAL = 1.0
"""Seconds from a kill to the first new step, at most, in the median under ``rekindle run``."""
_FAULTS = {"one rank": (1,), "all ranks": (0, 1)}
_STEPS = 100_000
"""Steps of a job that is ended before."""

Samples = dict[str, dict[str, list[dict[str, Any]]]]
"""By launcher and by ranks killed."""


@click.command(context_settings={"show_default": True}, help=__doc__)
@click.option("--only", multiple=True, type=click.Choice(tuple(LAUNCHERS)), help="A launcher to measure. Repeatable.")
@click.option("--rounds", type=click.IntRange(1), default=2, help="Times that each launcher has its turn.")
@click.option("--faults", type=click.IntRange(1), default=5, help="Kills of one rank, and of all, in a turn.")
@click.option("--width", type=click.IntRange(32), default=128, help="Features of the model, a multiple of 32.")
@click.option("--settle", "idle", type=click.FloatRange(0), default=5.0, help="Seconds to wait for an idle machine.")
@click.option(
    "--dir",
    "directory",
    type=click.Path(file_okay=False, path_type=Path),
    default=_HERE / "out",
    help="Where checkpoints go, into a temporary directory.",
    show_default="bench/out",
)
@click.option("--json", "output", type=click.Path(dir_okay=False, path_type=Path), help="File for every sample.")
@click.option("--docs", is_flag=True, help="Put the table and the plot into docs/benchmarks.md.")
def main(
    only: tuple[str, ...],
    rounds: int,
    faults: int,
    width: int,
    idle: float,
    directory: Path,
    output: Path | None,
    docs: bool,
) -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that a killed run tidies up too
    console = Console(width=None if sys.stdout.isatty() else 170)
    wanted = [name for name in only or LAUNCHERS if _is_there(name, console)]
    samples: Samples = {name: {fault: [] for fault in _FAULTS} for name in wanted}
    with scratch(directory) as place:
        machine = describe(place.target, place.memory, 1)
        turns = _Turns(place, width, idle)
        try:
            for turn in range(rounds):
                for name in wanted[turn % len(wanted) :] + wanted[: turn % len(wanted)]:
                    console.print(f"round {turn + 1} of {rounds}: {name}", highlight=False)
                    turns.strike(name, faults, samples[name])
            states = turns.check_bits()
        except Failed as error:
            raise click.ClickException(str(error)) from error
    document = {"machine": machine, "width": width, "rounds": rounds, "states_compared": states, "samples": samples}
    if output is not None:
        output.write_text(json.dumps(document, indent=1) + "\n")
    table = _tabulate(samples, states)
    console_table(console, table)
    if docs:
        _into_docs(document, table)


def _is_there(name: str, console: Console) -> bool:
    there = not name.startswith("NVRx") or importlib.util.find_spec("nvidia_resiliency_ext") is not None
    if not there:
        console.print(f"left out: {name}: nvidia_resiliency_ext is not installed", markup=False)
    return there


class _Turns:
    """The turns of all launchers, and the state after each step that they made."""

    def __init__(self, place: Scratch, width: int, idle: float) -> None:
        self._place, self._width, self._idle, self._count = place, width, idle, 0
        self._digests: dict[str, set[tuple[int, int, str]]] = {}

    def _launch(self, name: str, steps: int) -> Launched:
        self._count += 1
        directory = self._place.target / str(self._count)
        return Launched(name, directory, self._place.memory / str(self._count), steps, self._width)

    def strike(self, name: str, faults: int, samples: dict[str, list[dict[str, Any]]]) -> None:
        """One job, and its faults: one rank and all ranks by turns."""
        settle(self._idle)
        try:
            with self._launch(name, _STEPS) as job:
                for _ in range(faults):
                    for fault, ranks in _FAULTS.items():
                        samples[fault].append(job.strike(ranks))
        finally:
            self._place.stop_agents()
        self._digests.setdefault(name, set()).update(job.digests)

    def check_bits(self) -> int:
        """Compares each state of each job with that of a run without faults. Returns how many. Raises Failed."""
        last = max(step for digests in self._digests.values() for _, step, _ in digests)
        try:
            with self._launch("torchrun", last) as job:
                job.run_to(last)
                job.wait_for_end()
        finally:
            self._place.stop_agents()
        for name, digests in self._digests.items():
            if wrong := sorted(digests - job.digests):
                raise Failed(f"{name}: rank {wrong[0][0]} differs from a run without faults after step {wrong[0][1]}")
        return sum(map(len, self._digests.values()))


def _tabulate(samples: Samples, compared: int) -> Table:
    rows = [
        [name, fault, f"{_middle(found):.2f}", f"{_least(found):.2f} to {_most(found):.2f}"]
        + [f"{seconds:.2f}" for seconds in _parts(found).values()]
        + [f"{sum(sample['warm'] for sample in found)} of {len(found)}", str(max(sample["lost"] for sample in found))]
        for name, faults in samples.items()
        for fault, found in faults.items()
    ]
    columns = ["launcher", "killed", "to the first new step, s", "range", *PARTS, "warm", "steps lost"]
    title = f"From a SIGKILL to the first new step, medians; {compared:,} states compared bit for bit; goal {_GOAL:g} s"
    return Table("recovery", title, columns, rows)


def _seconds(found: list[dict[str, Any]]) -> list[float]:
    return [sample["seconds"] for sample in found]


def _middle(found: list[dict[str, Any]]) -> float:
    return statistics.median(_seconds(found))


def _least(found: list[dict[str, Any]]) -> float:
    return min(_seconds(found))


def _most(found: list[dict[str, Any]]) -> float:
    return max(_seconds(found))


def _parts(found: list[dict[str, Any]]) -> dict[str, float]:
    return {part: statistics.median(sample["parts"][part] for sample in found) for part in PARTS}


def _into_docs(document: dict[str, Any], table: Table) -> None:
    from plots import draw_recovery

    bars = {
        f"{name}, {fault}": _parts(found)
        for name, faults in document["samples"].items()
        for fault, found in faults.items()
    }
    draw_recovery(bars, _DOCS / "img")
    blocks = {
        "recovery": f"{markdown(table)}\n\n![{table.title}](img/recovery.svg)",
        "recovery conditions": _conditions(document),
    }
    for name in put_blocks(_DOCS / "benchmarks.md", blocks):
        click.echo(f"docs/benchmarks.md has no place for {name!r}")


def _conditions(document: dict[str, Any]) -> str:
    """One paragraph: on what, when and how many."""
    machine = document["machine"]
    count = max(len(found) for faults in document["samples"].values() for found in faults.values())
    return (
        f"{machine['date'][:10]}: {machine['cpu']}, {machine['cores']} cores, "
        f"{machine['memory_bytes'] / 2**30:.0f} GiB, Linux {machine['kernel']}, Python {machine['python']}, "
        f"torch {machine['torch']}; {count} faults of each kind for each launcher, "
        f"{document['states_compared']:,} states compared bit for bit."
    )


if __name__ == "__main__":
    main()
