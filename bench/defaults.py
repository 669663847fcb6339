"""The price of all defaults: ``python bench/defaults.py``. A GPT trains with Rekindle, and without. Linux only.

The training of ``examples/train_gpt.py``, at width 128 (10 MB of state, saved at each step) and 1024 (0.6 GB). The two
jobs of a pair do the same steps, one after the other, each alone on the machine, so that what runs in the background
counts where it belongs. Which comes first changes from pair to pair. The time begins with the first step: the first
save and the memory that is made for it count, too. A figure is refused if no snapshot was made, or a job ended early.
"""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import click
import torch
from machine import describe, settle
from report import Table, console_table, markdown, put_blocks
from rich.console import Console

_HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(_HERE.parent / "examples"))

_LIMITS = {128: 1.03, 1024: 1.02}
"""Most times of plain training that a pair of each width may take."""
_STUCK = 4.0
"""Times its seconds after which a job is given up."""

Found = dict[str, Any]


class _Length(NamedTuple):
    """How long a job trains: so many steps, or if that is 0 as many as it does in these seconds."""

    steps: int
    seconds: float

    def is_over(self, done: int, took: float) -> bool:
        return done >= self.steps if self.steps else took >= self.seconds


def _train(with_rekindle: bool, width: int, root: str, length: _Length, threads: int, link: Connection) -> None:
    """Train, and send the steps done, their seconds and what was saved."""
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    from train_gpt import BATCH, CONTEXT, GPT

    import rekindle

    model = GPT(width)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.01, total_iters=50)
    text = torch.randint(256, (1_000_000,), dtype=torch.uint8)

    def train(ckpt: rekindle.Checkpointer | None) -> Found:
        done, began = 0, time.perf_counter()
        while not length.is_over(done, time.perf_counter() - began):
            start = torch.randint(len(text) - CONTEXT, (BATCH, 1))
            tokens = text[start + torch.arange(CONTEXT + 1)].long()
            loss = torch.nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            done += 1
            if ckpt is not None:
                ckpt.step(done)
            loss.item()
        return {"steps": done, "seconds": time.perf_counter() - began}

    if not with_rekindle:
        link.send(train(None))
        return
    ckpt = rekindle.Checkpointer(root, {"model": model, "optimizer": optimizer, "scheduler": scheduler})
    ckpt.restore()
    with ckpt.guard():
        found = train(ckpt)
    metrics = ckpt.metrics
    found |= {"saves": metrics.saves, "every": metrics.snapshot_every, "left_out": metrics.left_out}
    found |= {"nbytes": metrics.bytes_saved // max(1, metrics.saves), "stall": statistics.median(metrics.stalls or [0])}
    ckpt.close()
    link.send(found)


def _run(with_rekindle: bool, width: int, length: _Length, threads: int) -> Found:
    """Run one job, in a process of its own and on memory that nobody has touched."""
    context = multiprocessing.get_context("spawn")
    link, other = context.Pipe()
    with (
        tempfile.TemporaryDirectory(prefix="rekindle-bench-") as root,
        tempfile.TemporaryDirectory(prefix="rekindle-bench-", dir="/dev/shm") as memory,
    ):
        os.environ["REKINDLE_MEMORY"] = memory
        process = context.Process(target=_train, args=(with_rekindle, width, root, length, threads, other))
        process.start()
        other.close()
        try:
            if not link.poll(60 + _STUCK * length.seconds):
                raise click.ClickException("a job has not ended: nothing was measured")
            found: Found = link.recv()
        except EOFError:
            raise click.ClickException("a job has died: nothing was measured") from None
        finally:
            process.kill()
            process.join()
        return found


def _pair(width: int, length: _Length, threads: int, pause: float, *, ours_first: bool) -> dict[str, Found]:
    found = {}
    for with_rekindle in (ours_first, not ours_first):
        settle(pause)
        one = _run(with_rekindle, width, length, threads)
        if length.steps and one["steps"] != length.steps:
            raise click.ClickException(f"{one['steps']} of {length.steps} steps were done: nothing was measured")
        length = length._replace(steps=one["steps"])
        found["rekindle" if with_rekindle else "plain"] = one
    if not found["rekindle"]["saves"]:
        raise click.ClickException("no snapshot was made: nothing was measured")
    return found


def _row(width: int, pairs: list[dict[str, Found]]) -> list[str]:
    ratios = [pair["rekindle"]["seconds"] / pair["plain"]["seconds"] for pair in pairs]
    ours = [pair["rekindle"] for pair in pairs]
    return [
        f"{width}, {ours[-1]['nbytes'] / 1e6:.0f} MB",
        f"{statistics.median(one['steps'] for one in ours):g}",
        f"{statistics.median(pair['plain']['seconds'] for pair in pairs):.1f}",
        f"{statistics.median(one['seconds'] for one in ours):.1f}",
        f"{statistics.median(ratios):.3f}",
        f"{min(ratios):.3f} to {max(ratios):.3f}",
        f"{_LIMITS[width]:.2f}" if width in _LIMITS else "",
        f"{statistics.median(one['saves'] for one in ours):g}",
        f"{ours[-1]['every']}",
        f"{1e3 * statistics.median(one['stall'] for one in ours):.2f}",
    ]


_COLUMNS = [
    *("width, state", "steps", "plain, s", "all defaults, s", "ratio, median", "ratios", "bound"),
    *("snapshots", "one in … steps at the end", "stall, ms"),
]


@click.command(help=__doc__, context_settings={"show_default": True})
@click.option("--width", "widths", type=int, multiple=True, default=[128, 1024], help="Repeatable.")
@click.option("--seconds", type=click.FloatRange(1), default=120.0, help="Time that each job trains, about.")
@click.option("--pairs", type=click.IntRange(1), default=3, help="Pairs of each width.")
@click.option("--threads", type=click.IntRange(1), default=torch.get_num_threads(), help="Threads that torch may use.")
@click.option("--settle", "pause", type=click.FloatRange(0), default=10.0, help="Seconds to wait for an idle machine.")
@click.option("--json", "output", type=click.Path(dir_okay=False, path_type=Path), help="File for all samples.")
@click.option("--docs", is_flag=True, help="Put the table into docs/benchmarks.md.")
def main(
    widths: tuple[int, ...], seconds: float, pairs: int, threads: int, pause: float, output: Path | None, docs: bool
) -> None:
    found: dict[int, list[dict[str, Found]]] = {}
    for width in widths:
        length = _Length(0, seconds)
        for number in range(pairs):
            pair = _pair(width, length, threads, pause, ours_first=number % 2 == 1)
            length = _Length(pair["plain"]["steps"], seconds)
            found.setdefault(width, []).append(pair)
            if output is not None:
                output.write_text(json.dumps(found, indent=1) + "\n")
    machine = describe(Path(tempfile.gettempdir()), Path("/dev/shm"), threads)
    conditions = (
        f"{machine['date'][:10]}: {machine['cpu']}, {machine['cores']} cores, {threads} threads, Linux "
        f"{machine['kernel']}; {pairs} pair(s) of jobs of about {seconds:g} s"
    )
    table = Table("defaults", "All defaults beside plain training", _COLUMNS, [_row(*one) for one in found.items()])
    console_table(Console(width=None if sys.stdout.isatty() else 140), table)
    click.echo(conditions)
    if docs:
        path = _HERE.parent / "docs" / "benchmarks.md"
        for gone in put_blocks(path, {"defaults": markdown(table) + "\n\n" + conditions}):
            click.echo(f"docs/benchmarks.md has no place for {gone!r}")
    _check(found)


def _check(found: dict[int, list[dict[str, Found]]]) -> None:
    """Raises ClickException when the median of a width's ratios is over its bound."""
    for width, pairs in found.items():
        ratio = statistics.median(pair["rekindle"]["seconds"] / pair["plain"]["seconds"] for pair in pairs)
        if ratio > _LIMITS.get(width, math.inf):
            raise click.ClickException(f"width {width}: {ratio:.3f} times, the bound is {_LIMITS[width]:.2f}")


if __name__ == "__main__":
    main()
