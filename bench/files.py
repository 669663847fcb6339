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
from machine import describe
from report import Table, console_table, markdown, put_blocks
from rich.console import Console
from sizes import GIB, MIB, Size

_TENSOR = 32 * MIB
_OURS = "rekindle.save"
_TURNS = (_OURS, "torch.save to tmpfs", "torch.save to disk")
_PAUSE = 2.0
"""Seconds between saves, in which a training would train: a slot for the next one is made."""
_DOCS = Path(__file__).resolve().parent.parent / "docs"

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
    save, load = (rekindle.save, rekindle.load) if kind == _OURS else (torch.save, torch.load)
    seconds = []
    for number in range(saves):
        began = time.perf_counter()
        save(state, str(place / f"{number}.pt"))
        seconds.append(time.perf_counter() - began)
        if "tmpfs" in kind and number:
            (place / f"{number - 1}.pt").unlink()
        time.sleep(_PAUSE)
    if kind == _OURS:
        rekindle.flush(timeout=600)
    began = time.perf_counter()
    found = load(str(place / f"{saves - 1}.pt"), weights_only=True)
    loaded = time.perf_counter() - began
    assert all(torch.equal(found[name], tensor) for name, tensor in state.items())
    return {"copy": copy, "first": seconds[0], "next": seconds[1:], "load": loaded}


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


def _tabulate(turns: dict[str, list[Turn]], size: int) -> Table:
    rows = []
    for kind, done in turns.items():
        later = [seconds for one in done for seconds in one["next"]]
        copies = [seconds / one["copy"] for one in done for seconds in one["next"]]
        figures = [statistics.median(one["first"] for one in done), statistics.median(later), max(later)]
        loads = statistics.median(one["load"] for one in done)
        rows.append(
            [kind, *(f"{value:.3f}" for value in figures), f"{statistics.median(copies):.2f}", f"{loads:.3f}"],
        )
    columns = ["", "first save, s", "later saves, s", "longest, s", "later saves, copies", "load, s"]
    return Table("files", f"{size / GIB:.2g} GiB saved by its path, medians", columns, rows)


def _into_docs(turns: dict[str, list[Turn]], table: Table, conditions: str) -> None:
    from plots import draw_files

    draw_files(turns, _DOCS / "img")
    blocks = {
        "files": f"{markdown(table)}\n\n![{table.title}](img/files.svg)",
        "files conditions": conditions,
    }
    for name in put_blocks(_DOCS / "benchmarks.md", blocks):
        click.echo(f"docs/benchmarks.md has no place for {name!r}")


def _conditions(turns: dict[str, list[Turn]], machine: dict[str, Any], saves: int) -> str:
    """One paragraph: on what, when and how many."""
    copy = statistics.median(one["copy"] for done in turns.values() for one in done)
    return (
        f"{machine['date'][:10]}: {machine['cpu']}, {machine['cores']} cores, {machine['memory_bytes'] / GIB:.0f} GiB, "
        f"Linux {machine['kernel']}, the disk with {machine['target_file_system']}, Python {machine['python']}, torch "
        f"{machine['torch']}; {len(turns[_OURS])} turns of {saves} saves, {_PAUSE:g} s apart; one copy by one thread "
        f"takes {copy:.3f} s."
    )


@click.command(context_settings={"show_default": True}, help=__doc__)
@click.option("--size", type=Size(), default="1GiB", help="Bytes of the state.")
@click.option("--rounds", type=click.IntRange(1), default=3, help="Times that every contender has its turn.")
@click.option("--saves", type=click.IntRange(2), default=4, help="Saves in each turn.")
@click.option("--dir", "directory", type=click.Path(path_type=Path), default=None, help="A directory on a real disk.")
@click.option("--json", "output", type=click.Path(dir_okay=False, path_type=Path), help="File for every sample.")
@click.option("--docs", is_flag=True, help="Put the table and the plot into docs/benchmarks.md.")
@click.option("--turn", default=None, hidden=True)
@click.option("--memory", type=click.Path(path_type=Path), default=None, hidden=True)
def main(
    size: int,
    rounds: int,
    saves: int,
    directory: Path | None,
    output: Path | None,
    docs: bool,
    turn: str | None,
    memory: Path | None,
) -> None:
    if turn is not None:
        assert directory is not None and memory is not None
        print(json.dumps(_turn(turn, size, saves, directory, memory)))
        return
    turns: dict[str, list[Turn]] = {kind: [] for kind in _TURNS}
    with tempfile.TemporaryDirectory(dir=directory) as disk:
        machine = describe(Path(disk), Path("/dev/shm"), 1)
        for number in range(rounds):
            for kind in _TURNS[number % len(_TURNS) :] + _TURNS[: number % len(_TURNS)]:
                turns[kind].append(_in_its_own_process(kind, size, saves, Path(disk)))
    if output is not None:
        output.write_text(json.dumps({"machine": machine, "size": size, "turns": turns}, indent=1) + "\n")
    table, conditions = _tabulate(turns, size), _conditions(turns, machine, saves)
    console = Console(width=None if sys.stdout.isatty() else 170)
    console_table(console, table)
    console.print(conditions, markup=False)
    if docs:
        _into_docs(turns, table, conditions)


if __name__ == "__main__":
    main()
