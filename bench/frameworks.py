"""The price of an adapter for each framework's steps: ``python bench/frameworks.py``. Linux only.

Each framework trains the same script with Rekindle, which takes a snapshot of every step, and without. Both take turns,
each in processes of its own, which begin with the other one in every round: two neighbours are one sample. A framework
is left out whose environment is not there; ``make transformers`` and the like make it. About two minutes for each.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import click
from machine import describe
from report import Table, console_table, markdown, put_blocks
from rich.console import Console
from scratch import Failed, Scratch, scratch
from sizes import GIB, MIB

_HERE = Path(__file__).resolve().parent
_DOCS = _HERE.parent / "docs"
_JOB = _HERE / "frameworks_job.py"
_FIRST = 10
"""Steps in which layouts are made and memory for snapshots: they are told apart."""
_LIMIT = 600.0
"""Seconds after which a training counts as hung."""
_KINDS = ("with", "alone")

Turn = dict[str, Any]
Pair = dict[str, Turn]


class Framework(NamedTuple):
    """A framework that has an adapter."""

    title: str
    home: str
    """Its environment's name; empty for this one."""


_FRAMEWORKS = {
    "transformers": Framework("Hugging Face Trainer", "transformers"),
    "accelerate": Framework("Accelerate", "transformers"),
    "lightning": Framework("Lightning", ""),
    "torchtitan": Framework("torchtitan", "torchtitan"),
    "ray": Framework("Ray Train", "ray"),
}


def _python_of(name: str) -> str | None:
    """Returns the Python that has a framework; None if it is not installed."""
    home = _FRAMEWORKS[name].home
    if not home:
        return sys.executable if importlib.util.find_spec(name) else None
    place = Path(os.environ.get(f"REKINDLE_TEST_{home.upper()}", _HERE.parent / f".venv-{home}"))
    python = place / "bin" / "python"
    return str(python) if python.exists() else None


def _turn(name: str, python: str, how: str, steps: int, place: Scratch) -> Turn:
    """Trains once. Raises Failed."""
    where, memory, result = place.target / "turn", place.memory / "turn", place.target / "result"
    where.mkdir()
    memory.mkdir()
    result.unlink(missing_ok=True)
    own = {"REKINDLE_MEMORY": str(memory), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    own["PYTHONPATH"] = f"{_HERE.parent / 'src'}:{_HERE}"
    said = where / "said"
    with said.open("w") as output:
        process = subprocess.Popen(
            [python, str(_JOB), name, str(result), str(where / "run"), str(steps), how],
            env={**os.environ, **own},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        code: int | None = process.wait(_LIMIT)
    except subprocess.TimeoutExpired:
        code = None
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        place.stop_agents()
        text = said.read_text(errors="replace")[-4000:]
        shutil.rmtree(where)
        shutil.rmtree(memory, ignore_errors=True)
    if code != 0 or not result.exists():
        ended = "did not end" if code is None else f"ended with {code}"
        raise Failed(f"{name}, {how}: {ended}:\n{text}")
    turn: Turn = json.loads(result.read_bytes())
    if how == "with" and turn["snapshots"] < steps - _FIRST:  # it would not be what the table says
        raise Failed(f"{name}: {turn['snapshots']} snapshots in {steps} steps: nothing was measured")
    return turn


def _all_pairs(names: list[str], rounds: int, steps: int, place: Scratch) -> tuple[dict[str, list[Pair]], list[str]]:
    """Returns the pairs of each framework, and what went wrong: one that fails is not tried again."""
    pairs, wrong = dict[str, list[Pair]](), list[str]()
    pythons = {name: python for name in names if (python := _python_of(name)) is not None}
    for name in names:
        if name not in pythons:
            click.echo(f"left out: {name} is not installed: make {_FRAMEWORKS[name].home or name}", err=True)
    for number in range(rounds):
        for name, python in list(pythons.items()):
            try:
                pair = {how: _turn(name, python, how, steps, place) for how in _KINDS[:: 1 - 2 * (number % 2)]}
            except Failed as error:
                wrong.append(str(error))
                del pythons[name]
                continue
            pairs.setdefault(name, []).append(pair)
            click.echo(f"{number + 1} of {rounds}, {name}: {_ratio(pair, _FIRST):.3f}", err=True)
    return pairs, wrong


def _ratio(pair: Pair, first: int) -> float:
    """Returns the ratio of the times of all steps from ``first`` on: a few that are slow count for what they cost."""
    with_it, alone = (sum(pair[how]["seconds"][first:]) for how in _KINDS)
    return with_it / alone


def _tabulate(pairs: dict[str, list[Pair]], steps: int) -> Table:
    rows = []
    for name, done in pairs.items():
        turn = done[0]["with"]
        row = [f"{_FRAMEWORKS[name].title}, {turn['version']}", f"{turn['bytes'] / MIB:.0f}"]
        for how in ("alone", "with"):
            row.append(f"{statistics.median(statistics.mean(p[how]['seconds'][_FIRST:]) for p in done) * 1e3:.1f}")
        ratios = [_ratio(pair, _FIRST) for pair in done]
        row += [f"{statistics.median(ratios):.3f}", f"{min(ratios):.3f} to {max(ratios):.3f}"]
        row.append(f"{statistics.median(_ratio(pair, 0) for pair in done):.3f}")
        row.append(f"{min(pair['with']['snapshots'] for pair in done)} of {steps}")
        rows.append(row)
    columns = ["", "MiB of state", "step, ms", "with Rekindle", "ratio", "from, to", "ratio, first steps too"]
    return Table("frameworks", "A snapshot at every step of each framework, medians", [*columns, "snapshots"], rows)


def _conditions(rounds: int, steps: int) -> str:
    """One paragraph: on what, when and how many."""
    machine = describe(_HERE, Path("/dev/shm"), 1)
    return (
        f"{machine['date'][:10]}: {machine['cpu']}, {machine['cores']} cores, {machine['memory_bytes'] / GIB:.0f} GiB, "
        f"Linux {machine['kernel']}, Python {machine['python']}, torch {machine['torch']}, 1 thread; {rounds} pairs of "
        f"trainings of {steps} steps, of which the first {_FIRST} are told apart."
    )


@click.command(context_settings={"show_default": True}, help=__doc__)
@click.option("--only", type=click.Choice([*_FRAMEWORKS]), multiple=True, help="A framework to measure. Repeatable.")
@click.option("--rounds", type=click.IntRange(1), default=5, help="Pairs of trainings.")
@click.option("--steps", type=click.IntRange(_FIRST + 2), default=70, help="Steps of a training.")
@click.option(
    "--dir",
    "directory",
    type=click.Path(file_okay=False, path_type=Path),
    default=_HERE / "out",
    help="Where checkpoints go, into a temporary directory; a real disk, not tmpfs.",
    show_default="bench/out",
)
@click.option("--json", "output", type=click.Path(dir_okay=False, path_type=Path), help="File for every sample.")
@click.option("--docs", is_flag=True, help="Put the table into docs/benchmarks.md.")
@click.option("--smoke", is_flag=True, help="One pair of short trainings, which checks rather than measures.")
def main(
    only: tuple[str, ...], rounds: int, steps: int, directory: Path, output: Path | None, docs: bool, smoke: bool
) -> None:
    if docs and (smoke or only):
        raise click.UsageError("--docs takes the figures of all frameworks, of whole trainings")
    if smoke:
        rounds, steps = 1, _FIRST + 5
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that a killed run tidies up too
    with scratch(directory) as place:
        pairs, wrong = _all_pairs([*(only or _FRAMEWORKS)], rounds, steps, place)
    _show(pairs, rounds, steps, output, docs=docs)
    if wrong:  # what was measured is not lost
        raise click.ClickException("\n".join(wrong))


def _show(pairs: dict[str, list[Pair]], rounds: int, steps: int, output: Path | None, *, docs: bool) -> None:
    table, conditions = _tabulate(pairs, steps), _conditions(rounds, steps)
    if output is not None:
        output.write_text(json.dumps({"conditions": conditions, "pairs": pairs}, indent=1) + "\n")
    console = Console(width=None if sys.stdout.isatty() else 170)
    console_table(console, table)
    console.print(conditions, markup=False)
    if docs:
        blocks = {"frameworks": markdown(table), "frameworks conditions": conditions}
        for name in put_blocks(_DOCS / "benchmarks.md", blocks):
            click.echo(f"docs/benchmarks.md has no place for {name!r}")


if __name__ == "__main__":
    main()
