"""The price of all defaults: ``python bench/defaults.py``. A GPT trains beside plain training, from the first step on.

The training of ``examples/train_gpt.py``, at width 128 (10 MB of state, saved at each step) and 1024 (0.6 GB). Both
jobs of a pair are started together and train in turns of some steps while the other one waits, so that both meet the
same machine: the first save, the memory that is made for it and all that runs in the background count, in the turn
of whoever trains then. A figure is refused if no snapshot was made, or a job did not do all of its steps. Linux only.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import click
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

_FIRST = 4
"""Turns after which the number of steps in one stays as it is. The first has one step."""
_LIMIT = 600.0
"""Seconds that a turn, or the start, may take."""


def _train(kind: str, width: int, root: str, memory: str, threads: int, link: Connection) -> None:
    """Train as many steps as ``link`` says, each time; tell the seconds that they took. Ends at zero."""
    os.environ["REKINDLE_MEMORY"] = memory
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    from train_gpt import BATCH, CONTEXT, GPT

    import rekindle

    model = GPT(width)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.01, total_iters=50)
    text = torch.randint(256, (1_000_000,), dtype=torch.uint8)
    ckpt = None
    if kind == "rekindle":
        ckpt = rekindle.Checkpointer(root, {"model": model, "optimizer": optimizer, "scheduler": scheduler})
        ckpt.restore()

    def run(first: int, steps: int) -> None:
        for step in range(first, first + steps):
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

    def serve() -> int:
        done = 0
        link.send("ready")
        while steps := link.recv():
            began = time.perf_counter()
            run(done + 1, steps)
            done += steps
            link.send(time.perf_counter() - began)
        return done

    if ckpt is None:
        link.send({"done": serve()})
        return
    with ckpt.guard():
        done = serve()
    metrics = ckpt.metrics
    found = {"done": done, "saves": metrics.saves, "every": metrics.snapshot_every, "left_out": metrics.left_out}
    found |= {"nbytes": metrics.bytes_saved // max(1, metrics.saves), "stall": statistics.median(metrics.stalls or [0])}
    ckpt.close()
    link.send(found)


class _Job:
    """One job of a pair."""

    def __init__(self, kind: str, width: int, directory: Path, threads: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._link, other = context.Pipe()
        self._memory = tempfile.TemporaryDirectory(prefix="rekindle-bench-", dir="/dev/shm")
        places = str(directory), self._memory.name
        self._process = context.Process(target=_train, args=(kind, width, *places, threads, other))
        self._process.start()
        other.close()
        self.seconds: list[float] = []

    def wait_ready(self) -> None:
        """Return once it has made its model."""
        self._hear()

    def turn(self, steps: int) -> None:
        self._link.send(steps)
        self.seconds.append(self._hear())

    def end(self) -> dict[str, Any]:
        self._link.send(0)
        found: dict[str, Any] = self._hear()
        self._process.join(_LIMIT)
        return found

    def _hear(self) -> Any:
        if not self._link.poll(_LIMIT):
            raise click.ClickException(f"a job has not answered within {_LIMIT:.0f} s")
        return self._link.recv()

    def close(self) -> None:
        self._process.kill()
        self._process.join()
        self._memory.cleanup()


def _pair(width: int, seconds: float, turn: float, threads: int, directory: Path) -> dict[str, Any]:
    """Returns both jobs' seconds by turn. The order changes with each turn."""
    jobs = {kind: _Job(kind, width, directory / kind, threads) for kind in ("plain", "rekindle")}
    try:
        for job in jobs.values():
            job.wait_ready()
        plain, rekindle = jobs.values()
        steps, done = 1, 0
        while sum(rekindle.seconds) < seconds:
            for job in (plain, rekindle) if len(plain.seconds) % 2 else (rekindle, plain):
                job.turn(steps)
            done += steps
            steps = steps if len(plain.seconds) > _FIRST else max(1, round(turn / plain.seconds[-1] * steps))
        found = {kind: job.end() for kind, job in jobs.items()}
    finally:
        for job in jobs.values():
            job.close()
    if {one["done"] for one in found.values()} != {done} or not found["rekindle"]["saves"]:
        raise click.ClickException(f"no figure: {done} steps, {found}")
    return {"width": width, "steps": done, **found["rekindle"], **{k: job.seconds for k, job in jobs.items()}}


def _ratios(found: dict[str, Any]) -> dict[str, float]:
    """Returns the time of all turns with Rekindle by that of plain training, and the same without the dearest turns."""
    pairs = list(zip(found["rekindle"], found["plain"], strict=True))
    each = [ours / plain for ours, plain in pairs[1:]]
    return {"whole": sum(found["rekindle"]) / sum(found["plain"]), "median": statistics.median(each)}


@click.command(help=__doc__)
@click.option("--width", "widths", type=int, multiple=True, default=[128, 1024], show_default=True, help="Repeatable.")
@click.option("--seconds", default=120.0, show_default=True, help="Time that each job trains.")
@click.option("--turn", default=2.0, show_default=True, help="Seconds of a turn, about.")
@click.option("--threads", default=torch.get_num_threads(), show_default=True, help="Threads that torch may use.")
@click.option("--json", "output", type=click.Path(dir_okay=False, path_type=Path), help="File for all samples.")
def main(widths: tuple[int, ...], seconds: float, turn: float, threads: int, output: Path | None) -> None:
    results = []
    for width in widths:
        load = os.getloadavg()[0]
        with tempfile.TemporaryDirectory(prefix="rekindle-bench-") as directory:
            found = _pair(width, seconds, turn, threads, Path(directory))
        ratios = _ratios(found)
        results.append({**found, **ratios, "load": load, "cores": os.cpu_count(), "threads": threads})
        click.echo(
            f"width {width}: {found['nbytes'] / 1e6:.0f} MB, {found['steps']} steps: {sum(found['plain']):.1f} s, "
            f"plain, with all defaults {sum(found['rekindle']):.1f} s: {ratios['whole']:.3f} times, median turn "
            f"{ratios['median']:.3f}. {found['saves']} snapshots, every {found['every']} steps at the end, "
            f"{found['left_out']} steps left out; stall {1e3 * found['stall']:.2f} ms. Load before: {load:.1f}"
        )
        if output is not None:
            output.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
