"""Every fault at every moment in every configuration, for real: ``python -m tests.faults.matrix``.

``--short`` runs one cell for each fault, the default every pair of (fault, moment) and of (configuration, fault),
``--full`` all.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import statistics
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import track
from rich.table import Table

from tests.faults.cluster import CONFIGS, FAULTS, MOMENTS, TWO_DIE, Cell, Outcome, run
from tests.pages import put

__all__ = ["cells", "judge", "play", "unbroken_run", "world_of"]

_DOCS = Path(__file__).parents[2] / "docs" / "faults.md"
_HANGS = ("stop", "loop", "block")


def cells(how: str) -> list[tuple[str, str, str]]:
    """(configuration, fault, moment) of every cell. Pairs go round the configurations."""
    every = list(itertools.product(CONFIGS, FAULTS, MOMENTS))
    if how == "full":
        return every
    pairs = [
        (CONFIGS[(i + j) % len(CONFIGS)], fault, moment)
        for (i, fault), (j, moment) in itertools.product(enumerate(FAULTS), enumerate(MOMENTS))
    ]
    return pairs if how == "pairs" else [pairs[i * len(MOMENTS) + i % len(MOMENTS)] for i in range(len(FAULTS))]


def world_of(config: str, fault: str = "") -> int:
    """Ranks of a cell: at least one survives, and ZeRO-1 needs two replicas of two ranks."""
    if config in ("zero", "hsdp"):
        return 4
    return 3 if fault in TWO_DIE else 2


def play(place: Path, memory: Path, config: str, fault: str, moment: str) -> Outcome:
    """One cell, with directories of its own."""
    root = Path(tempfile.mkdtemp(dir=place)) / "run"
    return run(Cell(root, memory, config, fault, moment, world=world_of(config, fault)))


def unbroken_run(place: Path, memory: Path, config: str, world: int) -> list[str]:
    """What the ranks of a run without a fault end with."""
    root = Path(tempfile.mkdtemp(dir=place)) / "run"
    return run(Cell(root, memory, config, world=world)).digests


def judge(outcome: Outcome, unbroken: list[str]) -> list[str]:
    """What is wrong with a cell; nothing if it is as promised."""
    wrong = []
    if outcome.resumed < 0:
        wrong.append("did not resume")
    if outcome.lost > 0:
        wrong.append(f"lost {outcome.lost} completed steps")
    if outcome.digests != unbroken:
        wrong.append("differs from the unbroken run")
    return wrong


def _rows(how: str, place: Path, memory: Path) -> Iterator[dict[str, Any]]:
    unbroken: dict[tuple[str, int], list[str]] = {}
    for config, fault, moment in _progress(cells(how)):
        kind = config, world_of(config, fault)
        if kind not in unbroken:
            unbroken[kind] = unbroken_run(place, memory, *kind)
        try:
            outcome = play(place, memory, config, fault, moment)
            wrong = judge(outcome, unbroken[kind])
        except AssertionError as error:
            outcome, wrong = Outcome(), [str(error)[-600:]]
        yield {
            "config": config,
            "fault": fault,
            "moment": moment,
            "wrong": wrong,
            **asdict(outcome),
            "lost": outcome.lost,
        }


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--short", "how", flag_value="short", help="Every fault once.")
@click.option("--pairs", "how", flag_value="pairs", default=True, help="Every pair of fault and moment. The default.")
@click.option("--full", "how", flag_value="full", help="Every cell.")
@click.option("--times", "how", flag_value="times", help="Ten times each: a death, a hang, a state of 400 MB.")
@click.option("--json", "output", type=click.Path(path_type=Path), help="File for all that was seen.")
@click.option("--docs", is_flag=True, help="Put what was seen into docs/faults.md.")
def main(how: str, output: Path | None, docs: bool) -> None:
    place = Path(tempfile.mkdtemp(prefix="rekindle-matrix-"))
    memory = Path(tempfile.mkdtemp(prefix="rekindle-matrix-", dir="/dev/shm" if os.path.isdir("/dev/shm") else None))
    try:
        rows = list(_times(place, memory) if how == "times" else _rows(how, place, memory))
    finally:
        shutil.rmtree(place, ignore_errors=True)
        shutil.rmtree(memory, ignore_errors=True)
    table = Table(*_HEADS)
    for row in rows:
        table.add_row(*_texts(row))
    Console(width=None if sys.stdout.isatty() else 200).print(table)
    click.echo(_medians(rows))
    if output:
        output.write_text(json.dumps(rows, indent=1) + "\n")
    if docs:
        _into_docs(how, rows)
    bad = [row for row in rows if row["wrong"]]
    if bad:
        raise click.ClickException(f"{len(bad)} of {len(rows)} cells are wrong")


_HEADS = (
    *("configuration", "fault", "moment", "noticed as", "noticed, ms", "secured, ms", "gone, s", "again, s"),
    *("lost", ""),
)


def _times(place: Path, memory: Path) -> Iterator[dict[str, Any]]:
    """Cells whose medians are promised."""
    kinds = {
        "death": {"config": "ddp", "fault": "kill", "moment": "all-reduce"},
        "hang": {"config": "ddp", "fault": "loop", "moment": "forward"},
        "400 MB": {"config": "bare", "fault": "kill", "moment": "forward", "width": 3333, "steps": 5, "at": 4},
    }
    for kind, what in _progress([kind for kind in kinds.items() for _ in range(10)]):
        root = Path(tempfile.mkdtemp(dir=place)) / "run"
        outcome = run(Cell(root, memory, **what), timeout=180)  # type: ignore[arg-type]
        where = {"kind": kind, "config": what["config"], "fault": what["fault"], "moment": what["moment"]}
        wrong = [f"lost {outcome.lost} completed steps"] if outcome.lost > 0 else []
        yield {**where, "wrong": wrong, **asdict(outcome), "lost": outcome.lost}
        shutil.rmtree(root.parent)


def _progress(todo: list[Any]) -> Iterator[Any]:
    """A bar on a terminal, else a line now and then."""
    if sys.stderr.isatty():
        yield from track(todo, console=Console(stderr=True))
        return
    for number, one in enumerate(todo):
        if number % 10 == 0:
            click.echo(f"{number} of {len(todo)} cells done", err=True)
        yield one


def _texts(row: dict[str, Any]) -> list[str]:
    def ms(value: float) -> str:
        return f"{value * 1e3:,.0f}" if value > -1 else "-"

    return [
        *(row["config"], row["fault"], row["moment"], row["cause"] or "-", ms(row["noticed"]), ms(row["secured"])),
        *(f"{row['gone']:.2f}", f"{row['again']:.2f}", str(max(0, row["lost"])), "; ".join(row["wrong"]) or "ok"),
    ]


def _medians(rows: list[dict[str, Any]]) -> str:
    def median(values: list[float]) -> float:
        return statistics.median(values) if values else float("nan")

    parts = [f"{len(rows)} cells, {sum(not row['wrong'] for row in rows)} as promised"]
    for kind in sorted({row.get("kind", row["cause"]) for row in rows} - {""}):
        some = [row for row in rows if row.get("kind", row["cause"]) == kind]
        noticed = median([row["noticed"] for row in some])
        secured = [row["secured"] - row["noticed"] for row in some if row["secured"] > -1]
        gone = [row["gone"] - row["secured"] for row in some if row["secured"] > -1]
        parts.append(
            f"{kind}: noticed after {noticed * 1e3:,.0f} ms, secured {median(secured) * 1e3:,.0f} ms later, "
            f"all gone {median(gone) * 1e3:,.0f} ms after that (medians of {len(some)})"
        )
    return "\n".join(parts)


def _into_docs(how: str, rows: list[dict[str, Any]]) -> None:
    mark = "times" if how == "times" else "matrix"
    lines = [*(f"- {line}" for line in _medians(rows).splitlines()), ""]
    if how != "times":
        lines += ["| " + " | ".join(_HEADS) + " |", "| " + " | ".join("---" for _ in _HEADS) + " |"]
        lines += ["| " + " | ".join(_texts(row)) + " |" for row in rows]
    put(_DOCS, mark, "\n".join(lines))


if __name__ == "__main__":
    main()
