"""Cost of the metrics: ``python bench/metrics.py``. Their part of ``ckpt.step()``, the memory of processes, a scrape.

A job of one rank trains in this process, with an agent of its own. ``rekindle metrics`` serves it, then a hundred jobs.
Linux only.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import click

_DOCS = Path(__file__).resolve().parent.parent / "docs"
_STEPS = 200
_ROUNDS = 50
"""Of which the median counts, each of so many steps."""
_SCRAPES = 50
_JOBS, _RANKS = 100, 8
_GOAL_STEP, _GOAL_AGENT = 5e-6, 60
"""Seconds in a step, and MB of the agent, at most."""


def _measure(place: Path) -> dict[str, float]:
    from machine import status_bytes

    import rekindle
    from rekindle.memory.job_dir import JobDir

    model, found = {"values": rekindle.Values(a=1)}, {}
    with rekindle.Checkpointer(place / "root", model, memory=place / "memory", persist_seconds=0.2) as ckpt:
        for n in range(1, 200):
            ckpt.step(n)
            time.sleep(0.01)
        job = JobDir.of(place / "root", next((place / "memory").glob("rekindle-*")))
        found["a step() with a snapshot, in all"] = _per_step(ckpt.step, 200)
        found["metrics and records in it"] = _per_step(lambda n: _note(ckpt, n), 10**6)
        pricing = ckpt._saver.schedule.pricing
        assert pricing is not None
        found["prices in it"] = _per_step(lambda n: pricing.stepped(1e-3 if n % 2 else None), 1)
        found["writing the prices"] = _per_step(lambda _: pricing._look(), 1)
        agent = job.agent()
        assert agent is not None
        found["agent"] = status_bytes(agent, "VmRSS")
        with _served(place / "memory") as (url, pid):
            found["scrape of a job"] = _scrape(url)
            found["rekindle metrics, a job"] = status_bytes(pid, "VmRSS")
            _make_jobs(place)
            found["scrape of a hundred jobs"] = _scrape(url)
            found["rekindle metrics, a hundred jobs"] = status_bytes(pid, "VmRSS")
        found["agent after the scrapes"] = status_bytes(agent, "VmRSS")
    return found


def _note(ckpt: Any, n: int) -> None:
    """Does what a step with a snapshot adds for metrics and for records of incidents."""
    clock = ckpt._saver.schedule.clock
    clock.tick()
    ckpt.metrics.timed(clock.took)
    ckpt.metrics.concluded(0.0)
    ckpt.metrics.saved(0.0, 1)
    ckpt.metrics.stepped(n)
    ckpt._clock.stepped(n)


def _per_step(work: Callable[[int], object], first: int) -> float:
    rounds = []
    for number in range(_ROUNDS):
        steps = range(first + number * _STEPS, first + (number + 1) * _STEPS)
        began = time.perf_counter()
        for n in steps:
            work(n)
        rounds.append((time.perf_counter() - began) / _STEPS)
    return statistics.median(rounds)


@contextlib.contextmanager
def _served(memory: Path) -> Iterator[tuple[str, int]]:
    command = [sys.executable, "-m", "rekindle", "metrics", "--port", "0", "--memory", str(memory)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        yield process.stderr.readline().split()[-1], process.pid
    finally:
        process.terminate()
        process.wait()


def _scrape(url: str) -> float:
    def once() -> float:
        began = time.perf_counter()
        with urlopen(url, timeout=60) as answer:
            answer.read()
        return time.perf_counter() - began

    return statistics.median(once() for _ in range(_SCRAPES))


def _make_jobs(place: Path) -> None:
    """Makes a hundred jobs of eight ranks by hand, each with two steps in memory and one on storage."""
    from tests.stored import job_in, remember

    from rekindle.memory.costs import CostPage, Costs, cost_page

    for number in range(_JOBS - 1):
        job = job_in(place / "memory", place / f"root-{number}", _RANKS)
        for rank in range(_RANKS):
            for step in (1, 2):
                remember(job, step, rank, _RANKS)
            CostPage(cost_page(job.path, rank)).write(Costs(step=2))
        job.notes.write_durable(1)


def _tabulate(found: dict[str, float]) -> Any:
    from report import Table

    step = found["metrics and records in it"]
    rows = [
        ["a small step() with a snapshot, in all", f"{found['a step() with a snapshot, in all'] * 1e6:.0f} µs", ""],
        ["metrics and records in it", f"{step * 1e6:.1f} µs", f"{_GOAL_STEP * 1e6:.0f} µs"],
        ["prices for `auto` and `rekindle advise` in it", f"{found['prices in it'] * 1e6:.1f} µs", ""],
        ["writing them, every 5 s", f"{found['writing the prices'] * 1e6:.0f} µs", ""],
        *([name, f"{found[name] / 1e6:.0f} MB", f"{_GOAL_AGENT} MB"] for name in ("agent", "agent after the scrapes")),
        ["`rekindle metrics`, 1 job of 1 rank", f"{found['rekindle metrics, a job'] / 1e6:.0f} MB", ""],
        [f"the same, {_JOBS} jobs of {_RANKS} ranks", f"{found['rekindle metrics, a hundred jobs'] / 1e6:.0f} MB", ""],
        ["a scrape, 1 job of 1 rank", f"{found['scrape of a job'] * 1e3:.0f} ms", ""],
        [f"a scrape, {_JOBS} jobs of {_RANKS} ranks", f"{found['scrape of a hundred jobs'] * 1e3:.0f} ms", ""],
    ]
    return Table("metrics", "Cost of metrics", ["what", "measured", "at most"], rows)


@click.command(help=__doc__)
@click.option("--docs", is_flag=True, help="Put the table into docs/benchmarks.md.")
def main(docs: bool) -> None:
    from machine import describe
    from report import console_table, markdown, put_blocks
    from rich.console import Console
    from sizes import GIB

    sys.path.insert(0, str(_DOCS.parent))  # the tests make jobs by hand
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="rekindle-bench-", dir="/dev/shm") as place:
        table = _tabulate(_measure(Path(place)))
        machine = describe(Path(place), Path(place), 1)
    conditions = (
        f"{machine['date'][:10]}: {machine['cpu']}, {machine['cores']} cores, {machine['memory_bytes'] / GIB:.0f} GiB, "
        f"Linux {machine['kernel']}, Python {machine['python']}, with a load of {load:.1f} by other programs before it."
    )
    console = Console(width=None if sys.stdout.isatty() else 120)
    console_table(console, table)
    console.print(conditions, markup=False)
    if docs:
        for name in put_blocks(_DOCS / "benchmarks.md", {"metrics": markdown(table), "metrics conditions": conditions}):
            click.echo(f"docs/benchmarks.md has no place for {name!r}")


if __name__ == "__main__":
    main()
