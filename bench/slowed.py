"""Price of copies on peers for training: ``python bench/slowed.py``. Two nodes in namespaces train an FSDP2 model.

Jobs that copy each common step and jobs that copy nothing take turns: a pair of them is one sample. All else is the
same: every step is saved into memory. All steps count, those in which memory is made too. The first one, which waits
for the nodes to meet, is told by itself. A step sleeps for half of its time, as one does whose work is on a device.
Once all ranks share one core, so that others are to spare for agents; then they go where they like. About six minutes,
for root, on Linux.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import click
from sizes import MIB

_DOCS = Path(__file__).resolve().parent.parent / "docs"

Turn = dict[str, Any]


class Work(NamedTuple):
    """What each job does."""

    width: int
    steps: int
    pause: float
    cores: int
    """Cores that the ranks share, of all there are."""


def _train(work: Work, every: object) -> Turn:
    """Trains one job. Returns the seconds of its first step and of all others, and how many became node-safe."""
    from tests.nodes.job import Job
    from tests.nodes.lab import Lab
    from tests.nodes.train import Task

    with tempfile.TemporaryDirectory() as place, Lab(Path(place)) as lab:
        lab.add()
        lab.add()
        options = {"persist_every": 10**6, "peer_every": every}
        task = Task(str(lab.mount / "run"), place, "fsdp2", 2, work.steps, work.pause, options, width=work.width)
        with Job(lab, task, starts=1) as job:
            job.wait_until(lambda: len(job.rows("restored")) == 2, "restored ranks")  # by now each has its agent
            for rank in range(2):
                _confine(job.process_of(rank), work.cores)
            job.wait_for_end()
        began, *times = [row["t"] for row in job.rows() if row["rank"] == 0 and row["event"] in ("restored", "step")]
        seconds = [after - before for before, after in pairwise(times)]
        return {"first": times[0] - began, "seconds": seconds, "safe": len(job.safe_steps())}


def _confine(pid: int, cores: int) -> None:
    """Has a process and those threads that it will start run on so many cores, and leaves its children alone."""
    for thread in os.listdir(f"/proc/{pid}/task"):
        os.sched_setaffinity(int(thread), sorted(os.sched_getaffinity(0))[:cores])


def _turns(work: Work, rounds: int) -> list[tuple[Turn, Turn]]:
    """Pairs of a job that copies and one that doesn't."""
    found = []
    for number in range(rounds):
        pair = {every: _train(work, every) for every in (("auto", None), (None, "auto"))[number % 2]}
        found.append((pair["auto"], pair[None]))
        click.echo(f"{number + 1} of {rounds}: {_ratio(*found[-1]):.3f}", err=True)
    return found


def _ratio(copies: Turn, none: Turn) -> float:
    """Returns the ratio of the times of all steps: a few that are slow count for what they cost."""
    return sum(copies["seconds"]) / sum(none["seconds"])


def _row(cores: int, pairs: list[tuple[Turn, Turn]]) -> list[str]:
    ratios = [_ratio(*pair) for pair in pairs]
    row = [f"{cores} of {_cores()}"]
    for turns in zip(*pairs, strict=True):
        seconds = statistics.median(s for turn in turns for s in turn["seconds"])
        row.append(f"{seconds * 1e3:.1f}, first {statistics.median(turn['first'] for turn in turns):.1f} s")
    row += [f"{statistics.median(ratios):.3f}", f"{min(ratios):.3f} to {max(ratios):.3f}"]
    return [*row, f"{statistics.median(pair[0]['safe'] for pair in pairs):.0f}"]


def _tabulate(found: dict[int, list[tuple[Turn, Turn]]]) -> Any:
    from report import Table

    columns = ["cores of the ranks", "step with copies, ms", "without, ms", "ratio", "from, to", "steps copied"]
    title = "Training with copies and without: medians, and ratios of the times of all steps"
    return Table("slowed", title, columns, [_row(cores, pairs) for cores, pairs in found.items()])


def _cores() -> int:
    return len(os.sched_getaffinity(0))


def _conditions(pairs: list[tuple[Turn, Turn]], nbytes: int) -> str:
    from machine import describe
    from sizes import GIB

    machine = describe(Path(__file__).parent, Path("/dev/shm"), 1)
    return (
        f"{machine['date'][:10]}: {machine['cpu']}, {machine['cores']} cores for two nodes, "
        f"{machine['memory_bytes'] / GIB:.0f} GiB, Linux {machine['kernel']}, Python {machine['python']}; {len(pairs)} "
        f"pairs of jobs, {len(pairs[0][0]['seconds'])} steps of each; {nbytes / MIB:.0f} MiB of a rank."
    )


@click.command(context_settings={"show_default": True}, help=__doc__)
@click.option("--width", type=click.IntRange(8), default=1536, help="Features of each of the three layers.")
@click.option("--steps", type=click.IntRange(5), default=50, help="Steps of a job.")
@click.option("--pause", type=float, default=0.25, help="Seconds that a step sleeps.")
@click.option("--rounds", type=click.IntRange(1), default=3, help="Pairs of jobs.")
@click.option("--json", "output", type=click.Path(dir_okay=False, path_type=Path), help="File for every sample.")
@click.option("--docs", is_flag=True, help="Put the table into docs/benchmarks.md.")
def main(width: int, steps: int, pause: float, rounds: int, output: Path | None, docs: bool) -> None:
    from report import console_table, markdown, put_blocks
    from rich.console import Console

    sys.path.insert(0, str(_DOCS.parent))  # the tests have the lab
    found = {}
    for cores in (1, _cores()):
        click.echo(f"ranks on {cores} of {_cores()} cores", err=True)
        found[cores] = _turns(Work(width, steps, pause, cores), rounds)
    nbytes = 3 * 4 * 3 * (width * width + width) // 2  # weights and two moments of three layers, on two ranks
    table, conditions = _tabulate(found), _conditions(found[1], nbytes)
    if output is not None:
        output.write_text(json.dumps({"conditions": conditions, "pairs": found}, indent=1) + "\n")
    console = Console(width=None if sys.stdout.isatty() else 150)
    console_table(console, table)
    console.print(conditions, markup=False)
    if docs:
        for name in put_blocks(_DOCS / "benchmarks.md", {"slowed": markdown(table), "slowed conditions": conditions}):
            click.echo(f"docs/benchmarks.md has no place for {name!r}")


if __name__ == "__main__":
    main()
