"""A state dict saved by its path: ``python bench/files.py``. Rekindle beside torch.save and one memory copy.

Contenders take turns, each turn in a process of its own that makes the state, saves it several times to new paths, and
loads the last one. The first save is told apart: it pays for its pages. The copy is that of the same tensors into
memory that has been touched, by one thread, the fastest of five. Linux only.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table
from sizes import GIB, MIB, Size

_TENSOR = 32 * MIB
_TURNS = ("rekindle.save", "torch.save to tmpfs", "torch.save to disk")
_PAUSE = 2.0
"""Seconds between saves, in which a training would train: a slot for the next one is made."""

Turn = dict[str, Any]


def _state(nbytes: int) -> Any:
    import torch

    return {f"layer.{n}": torch.randn(_TENSOR // 4) for n in range(max(1, nbytes // _TENSOR))}


def _copy(state: Any) -> float:
    """Returns the seconds of one copy of the state's tensors, into memory that is there."""
    import torch

    torch.set_num_threads(1)
    room = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    seconds = []
    for _ in range(5):
        began = time.perf_counter()
        for name, tensor in state.items():
            room[name].copy_(tensor)
        seconds.append(time.perf_counter() - began)
    return min(seconds)


def _turn(kind: str, nbytes: int, saves: int, disk: Path, memory: Path) -> Turn:
    import torch

    import rekindle

    state = _state(nbytes)
    copy = _copy(state)
    place = memory if "tmpfs" in kind else disk
    save, load = (rekindle.save, rekindle.load) if kind.startswith("rekindle") else (torch.save, torch.load)
    seconds = []
    for number in range(saves):
        began = time.perf_counter()
        save(state, str(place / f"{number}.pt"))
        seconds.append(time.perf_counter() - began)
        if "tmpfs" in kind and number:
            (place / f"{number - 1}.pt").unlink()
        time.sleep(_PAUSE)
    durable = None
    if kind.startswith("rekindle"):
        began = time.perf_counter()
        rekindle.flush(timeout=600)
        durable = time.perf_counter() - began
    began = time.perf_counter()
    found = load(str(place / f"{saves - 1}.pt"), weights_only=True)
    loaded = time.perf_counter() - began
    assert all(torch.equal(found[name], tensor) for name, tensor in state.items())
    return {"kind": kind, "copy": copy, "first": seconds[0], "next": seconds[1:], "load": loaded, "flush": durable}


def _in_its_own_process(kind: str, nbytes: int, saves: int, disk: Path) -> Turn:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as memory:
        place = disk / "turn"
        place.mkdir()
        command = [sys.executable, __file__, "--turn", kind, "--size", str(nbytes), "--saves", str(saves)]
        environment = {**os.environ, "REKINDLE_MEMORY": memory, "REKINDLE_FILES_IDLE_TIMEOUT": "0.5"}
        done = subprocess.run(
            [*command, "--dir", str(place), "--memory", memory], env=environment, stdout=subprocess.PIPE, check=True
        )
        until = time.monotonic() + 60
        while list(Path(memory).glob("rekindle-*/files")) and time.monotonic() < until:
            time.sleep(0.1)  # its agent leaves
        shutil.rmtree(place)
        turn: Turn = json.loads(done.stdout.splitlines()[-1])
        return turn


@click.command(context_settings={"show_default": True}, help=__doc__)
@click.option("--size", type=Size(), default="1GiB", help="Bytes of the state.")
@click.option("--rounds", default=3, help="Times that every contender has its turn.")
@click.option("--saves", default=4, help="Saves in each turn.")
@click.option("--dir", "directory", type=click.Path(path_type=Path), default=None, help="A directory on a real disk.")
@click.option("--turn", default=None, hidden=True)
@click.option("--memory", type=click.Path(path_type=Path), default=None, hidden=True)
def main(size: int, rounds: int, saves: int, directory: Path | None, turn: str | None, memory: Path | None) -> None:
    if turn is not None:
        assert directory is not None and memory is not None
        print(json.dumps(_turn(turn, size, saves, directory, memory)))
        return
    turns: dict[str, list[Turn]] = {kind: [] for kind in _TURNS}
    with tempfile.TemporaryDirectory(dir=directory) as disk:
        for _ in range(rounds):
            for kind, done in turns.items():
                done.append(_in_its_own_process(kind, size, saves, Path(disk)))
    table = Table("", "first save, s", "next saves, s", "x one copy", "load, s", title=f"{size / GIB:.2g} GiB by path")
    for kind, done in turns.items():
        after = [seconds for one in done for seconds in one["next"]]
        copies = [seconds / one["copy"] for one in done for seconds in one["next"]]
        row = (statistics.median(one["first"] for one in done), statistics.median(after), statistics.median(copies))
        table.add_row(kind, *(f"{value:.3f}" for value in row), f"{statistics.median(o['load'] for o in done):.3f}")
    console = Console()
    console.print(table)
    console.print(f"one copy: {statistics.median(one['copy'] for done in turns.values() for one in done):.3f} s")


if __name__ == "__main__":
    main()
