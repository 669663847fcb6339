"""torch.distributed.checkpoint with Rekindle's writer, reader and stager beside its own: ``python bench/dcp.py``.

All contenders take turns in the same processes, with the same sharded state, which changes before each save; the one
before is durable by then. Medians over the rounds, of the slowest rank in each. Linux only.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from machine import describe, settle
from rich.console import Console
from rich.table import Table
from sizes import MIB, Size

_TENSORS = 64
_SETTLE = 4.0
_LIMIT = 1200.0
_SMALL, _LOADS = MIB, 100
"""Bytes of a small state, and how often it is loaded: what a load costs by itself."""
_COLUMNS = ("save", "stall", "until saved", "load", "100 loads of 1 MiB")


@dataclass(frozen=True)
class _Ways:
    """One contender: what to hand to DCP."""

    writer: Callable[[int], Any]
    """By step."""
    reader: Callable[[int], Any]
    stager: Any
    durable: Callable[[int], object]
    """Returns when storage has the step, where that is the place to go."""


def _contenders(root: Path, memory: Path) -> Iterator[tuple[str, _Ways]]:
    from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
    from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

    from rekindle.format.names import MANIFEST, step_dir
    from rekindle.integrations.dcp import RekindleReader, RekindleWriter

    def stock(base: Path, stager: Any) -> _Ways:
        paths = {}  # a directory for each step, as torch writes over what is there

        def path(step: int) -> str:
            for other in set(paths) - {step, step - 1}:
                shutil.rmtree(paths.pop(other), ignore_errors=True)
            return str(paths.setdefault(step, base / str(step)))

        return _Ways(lambda s: FileSystemWriter(path(s)), lambda s: FileSystemReader(path(s)), stager, lambda s: None)

    def durable(step: int) -> None:
        while not (root / "rekindle" / step_dir(step) / MANIFEST).exists():
            time.sleep(0.005)

    yield "torch, to disk", stock(root / "torch", None)
    yield "torch, to tmpfs", stock(memory / "torch", None)
    again = DefaultStager(StagingOptions(False, False, False, False))
    yield "torch, to tmpfs, stager kept", stock(memory / "again", again)
    writer = RekindleWriter(root / "rekindle", keep=2)
    yield "Rekindle", _Ways(lambda s: writer, lambda s: RekindleReader(root / "rekindle"), None, durable)


def _state(nbytes: int, world: int, tensors: int = _TENSORS) -> dict[str, Any]:
    """A float32 state of so many bytes on all ranks together, cut up by rows, with a few small ones."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    mesh, columns = init_device_mesh("cpu", (world,)), 1024
    rows = max(1, nbytes // (tensors * columns * 4 * world))
    state: dict[str, Any] = {
        f"layer.{i}": DTensor.from_local(torch.randn(rows, columns), mesh, [Shard(0)]) for i in range(tensors)
    }
    return state | {"step": 0, "scale": torch.ones(3)}


def _timed(work: Callable[[], Any]) -> tuple[float, Any]:
    began = time.perf_counter()
    result = work()
    return time.perf_counter() - began, result


def _turn(ways: _Ways, state: dict[str, Any], small: dict[str, Any], step: int) -> dict[str, float]:
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp

    found = {}
    for what in ("save", "stall"):
        for value in state.values():
            if hasattr(value, "to_local"):
                value.to_local().add_(1)
        dist.barrier()
        settle(_SETTLE)
        dist.barrier()
        step += 1
        if what == "save":
            found["save"], _ = _timed(lambda at=step: dcp.save(state, storage_writer=ways.writer(at)))
        else:
            began = time.perf_counter()
            call = lambda at=step: dcp.async_save(  # noqa: E731
                state, storage_writer=ways.writer(at), async_stager=ways.stager
            )
            found["stall"], future = _timed(call)
            future.result()
            found["until saved"] = time.perf_counter() - began
        ways.durable(step)
    dist.barrier()
    settle(_SETTLE)
    dist.barrier()
    found["load"], _ = _timed(lambda: dcp.load(state, storage_reader=ways.reader(step)))
    step += 1
    dcp.save(small, storage_writer=ways.writer(step))
    ways.durable(step)
    dist.barrier()
    found[_COLUMNS[-1]], _ = _timed(lambda: [dcp.load(small, storage_reader=ways.reader(step)) for _ in range(_LOADS)])
    dist.barrier()
    return found


def _rank(rank: int, world: int, nbytes: int, rounds: int, target: str, memory: str, store: str, pipe: Any) -> None:
    import torch
    import torch.distributed as dist

    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    os.environ |= {"REKINDLE_MEMORY": memory, "LOCAL_WORLD_SIZE": str(world)}
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // world))
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    state, small, samples = _state(nbytes, world), _state(_SMALL, world, 8), []
    ways = dict(_contenders(Path(target), Path(memory)))
    for number in range(rounds + 1):  # the first one warms up, and is told of by itself
        for name in ways:
            samples.append((number, name, _turn(ways[name], state, small, 3 * number)))
    ways["Rekindle"].writer(0).close()
    pipe.send(samples)
    dist.barrier()
    os._exit(0)


def _measure(world: int, nbytes: int, rounds: int, target: Path, memory: Path) -> dict[str, list[dict[str, float]]]:
    """By contender: the samples of each round, the slowest rank's."""
    context = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    for rank in range(world):
        receive, send = context.Pipe(duplex=False)
        args = (rank, world, nbytes, rounds, str(target), str(memory), str(target / "store"), send)
        processes.append(context.Process(target=_rank, args=args, daemon=True))
        processes[-1].start()
        send.close()
        pipes.append(receive)
    try:
        if not all(pipe.poll(_LIMIT) for pipe in pipes):
            raise click.ClickException(f"no end after {_LIMIT:.0f} s")
        told = [pipe.recv() for pipe in pipes]
    finally:
        for process in processes:
            process.kill()
            process.join()
    found: dict[str, list[dict[str, float]]] = {}
    for turns in zip(*told, strict=True):
        found.setdefault(turns[0][1], []).append({what: max(turn[2][what] for turn in turns) for what in _COLUMNS})
    return found


def _table(world: int, found: dict[str, list[dict[str, float]]]) -> Table:
    medians = {
        name: {what: statistics.median(sample[what] for sample in samples[1:]) for what in _COLUMNS}
        for name, samples in found.items()
    }
    table = Table("", *(f"{what}, s" for what in _COLUMNS), "first save, s", "first stall, s", title=f"{world} rank(s)")
    for name, row in medians.items():
        ratios = [f" ({row[what] / medians['Rekindle'][what]:.1f}x)" if name != "Rekindle" else "" for what in _COLUMNS]
        cells = [f"{row[what]:.3f}{ratio}" for what, ratio in zip(_COLUMNS, ratios, strict=True)]
        table.add_row(name, *cells, f"{found[name][0]['save']:.3f}", f"{found[name][0]['stall']:.3f}")
    return table


@click.command(context_settings={"show_default": True}, help=__doc__)
@click.option("--size", type=Size(), default="512MiB", help="Bytes of the state, of all ranks together.")
@click.option("--ranks", "worlds", multiple=True, type=click.IntRange(1), default=[1, 2], help="Repeatable.")
@click.option("--rounds", type=click.IntRange(1), default=5, help="Turns of each contender after the first one.")
@click.option("--dir", "directory", type=click.Path(file_okay=False, path_type=Path), default=Path("bench/out"))
def main(size: int, worlds: tuple[int, ...], rounds: int, directory: Path) -> None:
    console = Console(width=150)
    directory.mkdir(parents=True, exist_ok=True)
    for world in worlds:
        with (
            tempfile.TemporaryDirectory(prefix="dcp-", dir=directory) as target,
            tempfile.TemporaryDirectory(prefix="bench-dcp-", dir="/dev/shm", ignore_cleanup_errors=True) as memory,
        ):
            place = describe(Path(target), Path(memory), os.cpu_count() or 1)
            found = _measure(world, size, rounds, Path(target).resolve(), Path(memory))
        console.print(_table(world, found))
    console.print(f"{size // MIB} MiB in {_TENSORS} tensors, {rounds} rounds; {place}")


if __name__ == "__main__":
    main()
