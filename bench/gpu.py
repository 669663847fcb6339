"""Measures the cost of a snapshot at every step on a CUDA device, and how near its copies come to the bus's limit.

Prints a table and writes JSON. Needs a device, and twice --size in /dev/shm.
"""

from __future__ import annotations

import json
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import click
import torch
from machine import describe
from rich.console import Console
from rich.table import Table
from sizes import Size

import rekindle

_LAYERS = 24


class Training:
    """A stack of linear layers with AdamW in float32 on the device, and batches that keep it busy."""

    def __init__(self, size: int, rows: int) -> None:
        width = max(64, int((size / 12 / _LAYERS) ** 0.5) // 64 * 64)  # the parameter and two moments, 4 bytes each
        layers = (torch.nn.Linear(width, width, device="cuda") for _ in range(_LAYERS))
        self.model = torch.nn.Sequential(*(part for layer in layers for part in (layer, torch.nn.GELU())))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self.batch = torch.randn(rows, width, device="cuda")
        self.update()

    def update(self) -> None:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = self.model(self.batch).float().square().mean()
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        self.optimizer.step()

    @property
    def nbytes(self) -> int:
        tensors = [p for p in self.model.parameters()]
        return sum(p.nbytes for p in tensors) + sum(
            value.nbytes for state in self.optimizer.state.values() for value in state.values()
        )


def seconds(work: Callable[[], object]) -> float:
    """Of one call, the device's part included."""
    torch.cuda.synchronize()
    began = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return time.perf_counter() - began


def bus(nbytes: int) -> dict[str, float]:
    """GB/s of one copy of ``nbytes`` to and from page-locked memory."""
    there = torch.empty(nbytes, dtype=torch.uint8, device="cuda")
    here = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    down = statistics.median(seconds(lambda: here.copy_(there, non_blocking=True)) for _ in range(7))
    up = statistics.median(seconds(lambda: there.copy_(here, non_blocking=True)) for _ in range(7))
    return {"from_device": nbytes / 1e9 / down, "to_device": nbytes / 1e9 / up}


def loop(training: Training, steps: int, save: Callable[[int], None] | None, first: int) -> float:
    """Seconds of one step of training, snapshots included, over ``steps`` of them."""

    def work() -> None:
        for number in range(steps):
            training.update()
            if save is not None:
                save(first + number)

    return seconds(work) / steps


@click.command(context_settings={"show_default": True}, help=__doc__)
@click.option("--size", type=Size(), default="4GiB", help="Bytes of the state.")
@click.option("--rows", type=click.IntRange(1), default=16384, help="Rows of a batch: what a step computes.")
@click.option("--rounds", type=click.IntRange(1), default=5, help="Windows with and without snapshots, in alternation.")
@click.option("--steps", type=click.IntRange(2), default=20, help="Steps in a window.")
@click.option("--json", "output", type=click.Path(dir_okay=False, path_type=Path), help="File for all samples.")
def main(size: int, rows: int, rounds: int, steps: int, output: Path | None) -> None:
    if not torch.cuda.is_available():
        raise click.ClickException("no CUDA device")
    target, memory = Path(tempfile.mkdtemp()), Path(tempfile.mkdtemp(dir="/dev/shm"))
    try:
        result = measure(size, rows, rounds, steps, target, memory)
    finally:
        shutil.rmtree(target, ignore_errors=True)
        shutil.rmtree(memory, ignore_errors=True)
    if output is not None:
        output.write_text(json.dumps(result, indent=1) + "\n")
    table = Table(title="CUDA")
    table.add_column("what")
    table.add_column("figure", justify="right")
    for name, value in result["summary"].items():
        table.add_row(name, f"{value:,.3f}")
    Console().print(table)


def measure(size: int, rows: int, rounds: int, steps: int, target: Path, memory: Path) -> dict[str, dict[str, object]]:
    training = Training(size, rows)
    limits = bus(1 << 30)
    state = {"model": training.model, "optimizer": training.optimizer}
    ckpt = rekindle.Checkpointer(target, state, memory=memory, persist_every=10**9, strict=True)
    ckpt.restore()
    loop(training, 5, None, 0)
    loop(training, 5, ckpt.step, 1)  # both slots page-locked
    first_stalls = list(ckpt.metrics.stalls)
    plain, saved, step = [], [], 6
    for _ in range(rounds):
        plain.append(loop(training, steps, None, 0))
        saved.append(loop(training, steps, ckpt.step, step))
        step += steps
    stalls = list(ckpt.metrics.stalls)[5:]

    def whole() -> None:
        ckpt.save(step, wait="memory")

    in_memory = seconds(whole)
    ckpt.close()
    again = Training(size, rows)
    ckpt = rekindle.Checkpointer(target, {"model": again.model, "optimizer": again.optimizer}, memory=memory)
    from_storage = seconds(ckpt.restore)
    again.update()
    ckpt.save(step + 1, wait="memory")
    ckpt._saver.memory.slots.ready()
    ckpt = None  # as if it had died: the snapshot stays
    ckpt = rekindle.Checkpointer(target, {"model": again.model, "optimizer": again.optimizer}, memory=memory)
    from_memory = seconds(ckpt.restore)
    ckpt.close()
    gigabytes, base, slow = training.nbytes / 1e9, statistics.median(plain), statistics.median(saved)
    summary = {
        "state, GB": gigabytes,
        "step without snapshots, ms": base * 1e3,
        "step with one at every step, ms": slow * 1e3,
        "slower by, %": 100 * (slow / base - 1),
        "host stall, first, ms": first_stalls[0] * 1e3,
        "host stall, later, ms": statistics.median(stalls) * 1e3,
        "bus limit from the device, GB/s": limits["from_device"],
        "snapshot, waited for, GB/s": gigabytes / in_memory,
        "snapshot / bus limit": gigabytes / in_memory / limits["from_device"],
        "bus limit to the device, GB/s": limits["to_device"],
        "restore from memory, GB/s": gigabytes / from_memory,
        "restore from memory / bus limit": gigabytes / from_memory / limits["to_device"],
        "restore from storage, GB/s": gigabytes / from_storage,
    }
    machine = {**describe(target, memory, torch.get_num_threads()), "device": torch.cuda.get_device_name()}
    return {"machine": machine, "summary": summary, "raw": {"plain": plain, "saved": saved, "stalls": stalls}}


if __name__ == "__main__":
    main()
