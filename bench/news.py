"""Time until all nodes know of a fault of one rank: ``python bench/news.py``. Three agents on loopback.

Each agent serves a memory directory and an address of its own, as on a node. Ranks are small processes. One of them is
killed; the clock runs until the ranks of both other nodes have been told by their agents. Linux only.
"""

from __future__ import annotations

import json
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import click

_NODES = 3
_DOCS = Path(__file__).resolve().parent.parent / "docs"


def _samples(count: int) -> list[float]:
    """Seconds from the death of a rank until the last rank of another node is told of it."""
    from tests.agent.agents import Agents

    found, chances = [], random.Random(0)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as place:
        agents = Agents(Path(place), _NODES)
        try:
            for number in range(count):
                ranks = agents.begin(_NODES)
                time.sleep(0.1 * chances.random())  # a beat is sent each 0.1 s
                victim = ranks[number % _NODES]
                killed = victim.kill()
                found.append(max(rank.fault()[0] for rank in ranks if rank is not victim) - killed)
        finally:
            agents.close()
    return found


def _tabulate(seconds: list[float]) -> Any:
    from report import Table

    ordered = sorted(seconds)
    row = [
        f"{value * 1e3:.0f}" for value in (statistics.median(ordered), ordered[int(0.9 * len(ordered))], ordered[-1])
    ]
    columns = ["deaths", "median, ms", "nine of ten within, ms", "longest, ms"]
    return Table("news", "Until all nodes know of a rank's death", columns, [[str(len(ordered)), *row]])


def _conditions() -> str:
    from machine import describe
    from sizes import GIB

    machine = describe(Path(__file__).parent, Path("/dev/shm"), 1)
    return (
        f"{machine['date'][:10]}: {machine['cpu']}, {machine['cores']} cores, {machine['memory_bytes'] / GIB:.0f} GiB, "
        f"Linux {machine['kernel']}, loopback, Python {machine['python']}; {_NODES} agents."
    )


@click.command(context_settings={"show_default": True}, help=__doc__)
@click.option("--count", type=click.IntRange(1), default=30, help="Ranks to kill.")
@click.option("--json", "output", type=click.Path(dir_okay=False, path_type=Path), help="File for every sample.")
@click.option("--docs", is_flag=True, help="Put the table into docs/benchmarks.md.")
def main(count: int, output: Path | None, docs: bool) -> None:
    from report import console_table, markdown, put_blocks
    from rich.console import Console

    sys.path.insert(0, str(_DOCS.parent))  # the tests have agents of several nodes
    seconds = _samples(count)
    table, conditions = _tabulate(seconds), _conditions()
    if output is not None:
        output.write_text(json.dumps({"conditions": conditions, "seconds": seconds}, indent=1) + "\n")
    console = Console(width=None if sys.stdout.isatty() else 120)
    console_table(console, table)
    console.print(conditions, markup=False)
    if docs:
        for name in put_blocks(_DOCS / "benchmarks.md", {"news": markdown(table), "news conditions": conditions}):
            click.echo(f"docs/benchmarks.md has no place for {name!r}")


if __name__ == "__main__":
    main()
