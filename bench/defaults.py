"""The price of all defaults: ``python bench/defaults.py``. A GPT trains with Rekindle, and without. Linux only.

The training of ``examples/train_gpt.py``, at width 128 (10 MB of state, saved at each step) and 1024 (0.6 GB). The two
jobs of a pair train in turns of some steps, as a machine's speed changes by more than what is to be seen. Whoever
waits is stopped, its agent too (SIGSTOP), so that what runs in the background counts where it belongs. The first step
has a turn of its own, so the first save and the memory that is made for it count. A figure is refused if no snapshot
was made, or there were fewer than eight turns: then --seconds is too short for such steps. Exits with 1 when a bound is
missed.
"""

from __future__ import annotations

import contextlib
import json
import math
import multiprocessing
import os
import signal
import statistics
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import click
import torch
from machine import describe
from report import Table, console_table, markdown, put_blocks
from rich.console import Console
from scratch import scratch

_HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(_HERE.parent / "examples"))

_LIMITS = {128: 1.03, 1024: 1.02}
"""Most times of plain training that a pair of each width may take: goals. The small state is saved at each step,
whatever that costs; the large one has a budget of 1 %, and as much again for all that is beside it."""
_FIRST = 4
"""Turns after which the number of steps in one stays as it is. The first has one step."""
_FEWEST = 8
"""Turns of each job below which there is no figure."""
_STUCK = 300.0
"""Seconds that a turn, or the start, may take."""

Found = dict[str, Any]


def _train(with_rekindle: bool, width: int, root: str, memory: str, threads: int, link: Connection) -> None:
    """Train as many steps as ``link`` says, each time, and send the seconds that they took. Ends at zero."""
    os.environ["REKINDLE_MEMORY"] = memory
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    from train_gpt import BATCH, CONTEXT, GPT

    import rekindle

    model = GPT(width)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.01, total_iters=50)
    text = torch.randint(256, (1_000_000,), dtype=torch.uint8)

    def train(ckpt: rekindle.Checkpointer | None) -> None:
        done = 0
        link.send("ready")
        while steps := link.recv():
            began = time.perf_counter()
            for step in range(done + 1, done + steps + 1):
                start = torch.randint(len(text) - CONTEXT, (BATCH, 1))
                tokens = text[start + torch.arange(CONTEXT + 1)].long()
                loss = torch.nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                scheduler.step()
                if ckpt is not None:
                    ckpt.step(step)
                loss.item()
            done += steps
            link.send(time.perf_counter() - began)

    if not with_rekindle:
        train(None)
        link.send({})
        return
    ckpt = rekindle.Checkpointer(root, {"model": model, "optimizer": optimizer, "scheduler": scheduler})
    ckpt.restore()
    with ckpt.guard():
        train(ckpt)
    metrics = ckpt.metrics
    found = {"saves": metrics.saves, "every": metrics.snapshot_every, "left_out": metrics.left_out}
    found |= {"nbytes": metrics.bytes_saved // max(1, metrics.saves), "stall": statistics.median(metrics.stalls or [0])}
    ckpt.close()
    link.send(found)


class _Job:
    """One job of a pair, in a process of its own and on memory that nobody has touched. Stopped but in its turns."""

    def __init__(self, with_rekindle: bool, width: int, threads: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._link, other = context.Pipe()
        self._undo = contextlib.ExitStack()
        self._scratch = self._undo.enter_context(scratch(_HERE / "out"))
        (self._scratch.memory / "memory").mkdir()
        places = str(self._scratch.target / "root"), str(self._scratch.memory / "memory")
        self._process = context.Process(target=_train, args=(with_rekindle, width, *places, threads, other))
        self._process.start()
        self._undo.callback(self._process.join)
        self._undo.callback(self._process.kill)
        other.close()
        self.seconds: list[float] = []
        self._hear()
        self._send(signal.SIGSTOP)

    def _send(self, number: int) -> None:
        for pid in filter(None, (self._process.pid, *self._scratch.agents())):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def turn(self, steps: int) -> None:
        self._send(signal.SIGCONT)
        self._link.send(steps)
        self.seconds.append(self._hear())
        self._send(signal.SIGSTOP)

    def end(self) -> Found:
        self._send(signal.SIGCONT)
        self._link.send(0)
        found: Found = self._hear()
        return found

    def _hear(self) -> Any:
        if not self._link.poll(_STUCK):
            raise click.ClickException("a job does not answer: nothing was measured")
        try:
            return self._link.recv()
        except EOFError:
            raise click.ClickException("a job has died: nothing was measured") from None

    def close(self) -> None:
        self._send(signal.SIGCONT)  # an agent that is stopped can't end
        self._undo.close()


def _pair(width: int, seconds: float, turn: float, threads: int) -> Found:
    """Returns both jobs' seconds by turn. The order changes with each turn."""
    with contextlib.ExitStack() as jobs:
        plain, ours = (_Job(with_rekindle, width, threads) for with_rekindle in (False, True))
        jobs.callback(plain.close)
        jobs.callback(ours.close)
        steps, done = 1, 0
        while sum(ours.seconds) < seconds:
            for job in (plain, ours) if len(plain.seconds) % 2 else (ours, plain):
                job.turn(steps)
            done += steps
            steps = steps if len(plain.seconds) > _FIRST else max(1, round(turn / plain.seconds[-1] * steps))
        plain.end()
        found = ours.end()
    if (turns := len(ours.seconds)) < _FEWEST:
        enough = math.ceil(_FEWEST * max(ours.seconds))
        raise click.ClickException(
            f"{turns} turns of each job, and {_FEWEST} are needed: nothing was measured. Try --seconds {enough}"
        )
    if not found["saves"]:
        raise click.ClickException("no step has a snapshot: nothing was measured. A longer --seconds may be enough")
    return {"steps": done, **found, "plain": plain.seconds, "rekindle": ours.seconds}


def _ratio(pair: Found) -> float:
    """Returns the time of all turns with Rekindle by that of plain training."""
    return sum(pair["rekindle"]) / sum(pair["plain"])


def _row(width: int, pairs: list[Found]) -> list[str]:
    ratios = [_ratio(pair) for pair in pairs]
    return [
        f"{width}, {pairs[-1]['nbytes'] / 1e6:.0f} MB",
        f"{statistics.median(pair['steps'] for pair in pairs):g}",
        f"{statistics.median(sum(pair['plain']) for pair in pairs):.1f}",
        f"{statistics.median(sum(pair['rekindle']) for pair in pairs):.1f}",
        f"{statistics.median(ratios):.3f}",
        f"{min(ratios):.3f} to {max(ratios):.3f}",
        f"{_LIMITS[width]:.2f}" if width in _LIMITS else "",
        f"{statistics.median(pair['saves'] for pair in pairs):g}",
        f"{pairs[-1]['every']}",
        f"{1e3 * statistics.median(pair['stall'] for pair in pairs):.2f}",
    ]


_COLUMNS = [
    *("width, state", "steps", "plain, s", "all defaults, s", "ratio, median", "ratios", "bound"),
    *("snapshots", "one in … steps at the end", "stall, ms"),
]


@click.command(help=__doc__, context_settings={"show_default": True})
@click.option("--width", "widths", type=int, multiple=True, default=[128, 1024], help="Repeatable.")
@click.option(
    "--seconds",
    type=click.FloatRange(1),
    default=120.0,
    help=f"Time that each job trains, about. {_FEWEST} turns at least.",
)
@click.option("--turn", type=click.FloatRange(0.1), default=5.0, help="Seconds of a turn, about.")
@click.option("--pairs", type=click.IntRange(1), default=3, help="Pairs of each width.")
@click.option("--threads", type=click.IntRange(1), default=torch.get_num_threads(), help="Threads that torch may use.")
@click.option("--json", "output", type=click.Path(dir_okay=False, path_type=Path), help="File for all samples.")
@click.option("--docs", is_flag=True, help="Put the table into docs/benchmarks.md.")
def main(
    widths: tuple[int, ...], seconds: float, turn: float, pairs: int, threads: int, output: Path | None, docs: bool
) -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    found: dict[int, list[Found]] = {}
    for width in widths:
        for _ in range(pairs):
            found.setdefault(width, []).append(_pair(width, seconds, turn, threads))
            if output is not None:
                output.write_text(json.dumps(found, indent=1) + "\n")
    machine = describe(_HERE, Path("/dev/shm"), threads)
    conditions = (
        f"{machine['date'][:10]}: {machine['cpu']}, {machine['cores']} cores, {threads} threads, Linux "
        f"{machine['kernel']}; {pairs} pair(s) of jobs of about {seconds:g} s each, in turns of {turn:g} s"
    )
    table = Table("defaults", "All defaults beside plain training", _COLUMNS, [_row(*one) for one in found.items()])
    console_table(Console(width=None if sys.stdout.isatty() else 140), table)
    click.echo(conditions)
    if docs:
        path = _HERE.parent / "docs" / "benchmarks.md"
        for gone in put_blocks(path, {"defaults": markdown(table) + "\n\n" + conditions}):
            click.echo(f"docs/benchmarks.md has no place for {gone!r}")
    for width, measured in found.items():
        ratio = statistics.median(map(_ratio, measured))
        if ratio > _LIMITS.get(width, math.inf):
            raise click.ClickException(f"width {width}: {ratio:.3f} times, the bound is {_LIMITS[width]:.2f}")


if __name__ == "__main__":
    main()
