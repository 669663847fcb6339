"""A state dict saved by its path: ``python bench/files.py``. Rekindle beside torch.save and one memory copy.

Contenders take turns, each turn in a process of its own that makes the state, saves it several times to new paths, and
loads the last one: Rekindle from memory, and then from its path, once memory has forgotten it. The first save is told
apart: it pays for its pages. The copy is that of the same tensors into memory that has been touched, by one thread, the
fastest of five. Linux only.
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
from machine import describe, free_memory
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
        _touch(nbytes)
        began = time.perf_counter()
        save(state, str(place / f"{number}.pt"))
        seconds.append(time.perf_counter() - began)
        if "tmpfs" in kind and number:
            (place / f"{number - 1}.pt").unlink()
        time.sleep(_PAUSE)
    if kind == _OURS:
        rekindle.flush(timeout=600)
    path = place / f"{saves - 1}.pt"
    turn = {"copy": copy, "first": seconds[0], "next": seconds[1:]}
    if kind != _OURS:
        return {**turn, "load": _load(load, path, state), "stored": None}
    assert str(path.resolve()) in [file.path for file in rekindle.files.status()], "memory has given it up"
    turn["load"] = _load(load, path, state)
    _forget(path)
    with open(path, "rb") as file:  # into the page cache, where torch.save leaves its own
        while file.read(16 * MIB):
            pass
    return {**turn, "stored": _load(load, path, state)}


def _load(load: Any, path: Path, state: Any) -> float:
    """Returns the seconds of a load, and compares all that was loaded."""
    import torch

    _touch(sum(tensor.nbytes for tensor in state.values()))
    began = time.perf_counter()
    found = load(str(path), weights_only=True)
    seconds = time.perf_counter() - began
    assert found.keys() == state.keys() and all(torch.equal(found[name], tensor) for name, tensor in state.items())
    return seconds


def _forget(path: Path) -> None:
    """Gives up the copy in memory of a file that storage has."""
    from rekindle.memory.files_dir import FilesDir
    from rekindle.memory.job_dir import memory_base
    from rekindle.memory.kept import key_of

    store = FilesDir.below(memory_base())
    store.give_up(store.kept.files(key_of(str(path.resolve()))))


def _touch(nbytes: int) -> None:
    """Touches memory, in a process that ends then. A virtual machine's host gives memory at its first touch, and takes
    it back a second after it was freed: it would be slow for whoever finds less of it free."""
    nbytes = min(nbytes, free_memory() // 2)
    touch = f"import mmap\nplace = mmap.mmap(-1, {nbytes})\nfor at in range(0, {nbytes}, 4096): place[at] = 1"
    subprocess.run([sys.executable, "-c", touch], check=True)


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
        stored = [one["stored"] for one in done if one["stored"] is not None]
        rows.append(
            [
                kind,
                *(f"{value:.3f}" for value in figures),
                *(f"{statistics.median(copies):.2f}", f"{loads:.3f}"),
                f"{statistics.median(stored):.3f}" if stored else "",
            ],
        )
    columns = [
        "",
        "first save, s",
        "later saves, s",
        "longest, s",
        "later saves, copies",
        "load, s",
        "from its path, s",
    ]
    return Table("files", f"{size / GIB:.2g} GiB saved by its path, medians", columns, rows)


def _into_docs(turns: dict[str, list[Turn]], table: Table, conditions: str) -> None:
    """Puts table and plot into docs/benchmarks.md, and the main figures into docs/files.md."""
    from plots import draw_files

    draw_files(turns, _DOCS / "img")
    blocks = {
        "files": f"{markdown(table)}\n\n![{table.title}](img/files.svg)",
        "files conditions": conditions,
    }
    cost = {"files cost": f"{table.title}:\n\n{markdown(table)}"}
    for page, own in (("benchmarks.md", blocks), ("files.md", cost)):
        for name in put_blocks(_DOCS / page, own):
            click.echo(f"docs/{page} has no place for {name!r}")


def _conditions(turns: dict[str, list[Turn]], machine: dict[str, Any], saves: int) -> str:
    """One paragraph: on what, when and how many."""
    copy = statistics.median(one["copy"] for done in turns.values() for one in done)
    return (
        f"{machine['date'][:10]}: {machine['cpu']}, {machine['cores']} cores, {machine['memory_bytes'] / GIB:.0f} GiB, "
        f"Linux {machine['kernel']}, the disk with {machine['target_file_system']}, Python {machine['python']}, torch "
        f"{machine['torch']}; {len(turns[_OURS])} turn(s) of {saves} saves, {_PAUSE:g} s apart; one copy by one thread "
        f"takes {copy:.3f} s."
    )


@click.command(context_settings={"show_default": True}, help=__doc__)
@click.option("--size", type=Size(), default="1GiB", help="Bytes of the state.")
@click.option("--rounds", type=click.IntRange(1), default=3, help="Times that every contender has its turn.")
@click.option("--saves", type=click.IntRange(2), default=4, help="Saves in each turn.")
@click.option("--dir", "directory", type=click.Path(path_type=Path), default=None, help="A directory on a real disk.")
@click.option("--json", "output", type=click.Path(dir_okay=False, path_type=Path), help="File for every sample.")
@click.option("--docs", is_flag=True, help="Put table and plot into docs/benchmarks.md, the table into docs/files.md.")
@click.option("--smoke", is_flag=True, help="A quick run at 64 MiB, which checks rather than measures.")
@click.option("--turn", default=None, hidden=True)
@click.option("--memory", type=click.Path(path_type=Path), default=None, hidden=True)
def main(
    size: int,
    rounds: int,
    saves: int,
    directory: Path | None,
    output: Path | None,
    docs: bool,
    smoke: bool,
    turn: str | None,
    memory: Path | None,
) -> None:
    if turn is not None:
        assert directory is not None and memory is not None
        print(json.dumps(_turn(turn, size, saves, directory, memory)))
        return
    if smoke and docs:
        raise click.UsageError("--smoke gives no figures worth a --docs")
    if docs:
        import plots  # noqa: F401  without matplotlib that is an error now, and not after minutes
    if smoke:
        size, rounds, saves = 64 * MIB, 1, 2
    turns: dict[str, list[Turn]] = {kind: [] for kind in _TURNS}
    with tempfile.TemporaryDirectory(dir=directory) as disk:
        machine = describe(Path(disk), Path("/dev/shm"), 1)
        _touch((saves + 5) * size)
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
