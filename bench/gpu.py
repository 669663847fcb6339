"""Measures a CUDA device, and Rekindle on it: experiments, each with the expected figure beside the measured one.

Each runs in a process of its own, with a limit: one that fails or hangs is reported, and the others go on. One whose
subject did not happen has failed, and its figure is not printed: a time-out is no measurement. Needs Linux,
a device, and 80 GiB of memory for the largest experiments. Where this user may mount a tmpfs, one is mounted.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import click
from on_gpu.cases import run_case
from on_gpu.device import describe_device
from on_gpu.experiments import BEYOND_ONE_DEVICE, EXPERIMENTS, RUNS, Experiment
from on_gpu.page import into_docs
from on_gpu.places import open_places
from on_gpu.results import Outcome
from on_gpu.runner import run_all, work_here
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from sizes import Size, size_text

_MINUTES = 9.0
"""Bound on a whole run."""


def show(outcome: Outcome) -> None:
    """Print the figures of one experiment, each beside the expected one."""
    title = f"{outcome.name}: {outcome.status}, {outcome.seconds:.0f} s"
    table = Table(title=title, title_justify="left", title_style="bold")
    table.add_column("what")
    table.add_column("measured", justify="right")
    table.add_column("expected")
    table.add_column("as expected")
    for figure in outcome.figures:
        met = "" if figure.met is None else "yes" if figure.met else "NO"
        table.add_row(escape(figure.what), escape(figure.shown), escape(figure.expected), met)
    console().print(table)
    if outcome.detail:
        console().print(escape(outcome.detail))


def console() -> Console:
    """Returns the terminal, or one that cuts no names where it is narrow, or output goes to a file."""
    return Console(width=max(Console().width, 150))


def measure(experiments: list[Experiment], minutes: float, output: Path | None) -> None:
    """Run experiments, print each outcome as it comes, and write all that there are to ``output`` each time."""
    device = describe_device()
    if "missing" in device:
        raise click.ClickException(f"no CUDA device: {device['missing']}")
    from machine import describe  # brings torch, which is not needed to be told of the commands

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # else mounts and processes would stay
    with open_places() as places:
        described = describe(Path(places.disk), Path(places.memory), os.cpu_count() or 1)
        document: dict[str, Any] = {"machine": {**described, **device, "memory_kind": places.kind}, "experiments": []}
        click.echo(f"{device['device']}; memory: {places.kind}")

        def tell(outcome: Outcome) -> None:
            show(outcome)
            document["experiments"].append(outcome.to_json())
            if output is not None:
                output.write_text(json.dumps(document, indent=1) + "\n")

        began = time.monotonic()
        outcomes = run_all(experiments, places, minutes * 60, tell)
    failed = [outcome.name for outcome in outcomes if outcome.status != "done"]
    off = [f"{o.name}: {f.what}" for o in outcomes for f in o.figures if f.met is False]
    click.echo(f"{len(outcomes) - len(failed)} of {len(outcomes)} done in {time.monotonic() - began:.0f} s")
    click.echo("not as expected: " + ("; ".join(off) or "nothing"))
    if failed:
        raise click.ClickException(f"not done: {', '.join(failed)}")


def json_option(command: Any) -> Any:
    path = click.Path(dir_okay=False, path_type=Path)
    return click.option("--json", "output", type=path, help="File for all figures and samples.")(command)


@click.group(help=__doc__)
def main() -> None:
    pass


@main.command("all")
@click.argument("run", type=click.Choice(sorted(RUNS)))
@click.option("--minutes", type=click.FloatRange(0.5), default=_MINUTES, show_default=True, help="Bound on the run.")
@click.option("--skip", multiple=True, type=click.Choice([e.name for e in EXPERIMENTS]), help="An experiment to omit.")
@json_option
def run_command(run: str, minutes: float, skip: tuple[str, ...], output: Path | None) -> None:
    """Make all experiments of run-1, the hardware, run-2, Rekindle on it, or run-3, what a user's job needs."""
    measure([e for e in EXPERIMENTS if e.run == run and e.name not in skip], minutes, output)


@main.command("list")
def list_command() -> None:
    """List the experiments with what is expected, and what one device can't show."""
    for run, title in RUNS.items():
        table = Table(title=f"{run}: {title}", title_justify="left", show_lines=True)
        for column in ("experiment", "measures", "must happen", "expected", "decides", "limit, s"):
            table.add_column(column)
        for e in EXPERIMENTS:
            if e.run == run:
                texts = map(escape, (e.title, e.subject, e.expected, e.decides))
                table.add_row(e.name, *texts, f"{e.budget:.0f}")
        console().print(table)
    click.echo("One device can't show:")
    for name, why in BEYOND_ONE_DEVICE.items():
        click.echo(f"  {name}: {why}")


@main.command("docs")
@click.argument("results", nargs=-1, required=True, type=click.Path(exists=True, dir_okay=False, path_type=Path))
def docs_command(results: tuple[Path, ...]) -> None:
    """Put the tables into docs/benchmarks.md, with the figures of files that --json has written.

    Figures of experiments that no file has stay as they are.
    """
    into_docs(results)


@main.command("work", hidden=True)
@click.argument("work")
@click.argument("task")
def work_command(work: str, task: str) -> None:
    work_here(work, json.loads(task))


@main.command("case", hidden=True)
@click.argument("work")
@click.argument("options")
@click.argument("fd", type=int)
def case_command(work: str, options: str, fd: int) -> None:
    run_case(work, json.loads(options), fd)


def _add(experiment: Experiment) -> None:
    """Make a subcommand of an experiment; its options are those of the function that makes it."""

    def run(output: Path | None, **options: Any) -> None:
        given = {**experiment.options, **options}
        # By itself it may take longer: options may ask for more than the run has time for.
        measure([Experiment(**{**vars(experiment), "options": given, "budget": 600.0})], 10.0, output)

    run.__doc__ = (
        f"Measure {experiment.title}.\n\nMust happen: {experiment.subject}. Expected: {experiment.expected}. "
        f"Decides: {experiment.decides}."
    )
    command = json_option(run)
    for name, default in experiment.options.items():
        command = _option(name, default)(command)
    main.command(experiment.name, short_help=experiment.title)(command)


def _option(name: str, default: Any) -> Any:
    helps = {
        "size": "Bytes of the state.",
        "rows": "Rows of a batch: what a step computes.",
        "rounds": "Windows with and without snapshots, in alternation.",
        "steps": "Steps in a window.",
        "width": "Features of the model, a multiple of 64.",
        "layers": "Blocks of the model.",
        "batch": "Sequences of a batch.",
        "tokens": "Tokens of a sequence.",
        "every": "Steps between saves of the ways that are not Rekindle's.",
        "storage": "Restore from storage too, not from memory alone.",
    }
    if isinstance(default, bool):
        return click.option(f"--{name}/--no-{name}", default=default, show_default=True, help=helps[name])
    kind: click.ParamType = click.IntRange(1)
    if name == "size":
        kind, default = Size(), size_text(default)
    return click.option(f"--{name}", type=kind, default=default, show_default=True, help=helps[name])


for _experiment in EXPERIMENTS:
    _add(_experiment)

if __name__ == "__main__":
    main()
