"""Each release of torch with each case, for real: ``python -m tests.torch_matrix [RELEASE[@PYTHON]]...``.

Makes an environment for each release, one after the other, runs the cases in it and removes it. Linux only.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from tests.pages import put
from tests.torch_matrix.cases import CASES, Place
from tests.torch_matrix.environment import NEWEST, Release, prepare

RELEASES = ("2.4.1", "2.6.0", "2.8.0", "2.10.0", "2.11.0", "2.12.1", "2.13.0", "2.14.1", NEWEST)
PYTHONS = ("2.4.1@3.10", "2.6.0@3.12", "2.8.0@3.13", "2.10.0@3.14")
_DOCS = Path(__file__).parents[2] / "docs" / "versions.md"
_CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rekindle-torch"
_HEADS = ("torch", "Python", *CASES)
_GONE = "not run"

Row = tuple[str, ...]


@click.command(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.argument("releases", nargs=-1)
@click.option("--case", "cases", multiple=True, type=click.Choice(tuple(CASES)), help="A case to run. Repeatable.")
@click.option("--environments", default=_CACHE, type=click.Path(path_type=Path), help="Where environments are made.")
@click.option("--keep", is_flag=True, help="Leave the environments there, 5 GB each where torch brings CUDA.")
@click.option("--docs", is_flag=True, help="Put what was seen into docs/versions.md. Other rows stay there.")
def main(releases: tuple[str, ...], cases: tuple[str, ...], environments: Path, keep: bool, docs: bool) -> None:
    wanted = [Release.parse(text) for text in releases or (*RELEASES, *PYTHONS)]
    if docs and cases:
        raise click.UsageError("--docs goes with all cases: a row of the page is whole")
    rows = []
    for release in wanted:
        rows.append(_row(release, cases or tuple(CASES), environments, keep))
        if docs:
            _publish(rows[-1])
    table = Table(*_HEADS)
    for row in rows:
        table.add_row(*row)
    Console(width=None if sys.stdout.isatty() else 220).print(table)
    if bad := sum(_is_bad(cell) for row in rows for cell in row):
        raise click.ClickException(f"{bad} cells are wrong")
    click.echo(f"{sum(cell != '' for row in rows for cell in row[2:])} passed, 0 failed")


def _row(release: Release, cases: tuple[str, ...], environments: Path, keep: bool) -> Row:
    began = time.monotonic()
    environments.mkdir(parents=True, exist_ok=True)
    try:
        environment = prepare(release, environments)
    except (RuntimeError, OSError) as error:
        click.echo(f"{release}: {_GONE}: {error}")
        return (release.torch, release.python, *[f"{_GONE}: no environment"] * len(CASES))
    click.echo(f"{release}: torch {environment.build}, ready in {time.monotonic() - began:.0f} s")
    memory = Path("/dev/shm") if Path("/dev/shm").is_dir() else None
    directory = Path(tempfile.mkdtemp(prefix="rekindle-torch-"))
    store = Path(tempfile.mkdtemp(prefix="rekindle-torch-", dir=memory))
    cells: list[str] = []
    try:
        cells += [_cell(name, Place(environment, directory, store)) if name in cases else "" for name in CASES]
    finally:
        for agent in _agents(store):
            with suppress(ProcessLookupError):
                os.kill(agent, signal.SIGKILL)
        shutil.rmtree(store, ignore_errors=True)
        if any(map(_is_bad, cells)):
            click.echo(f"  what its processes said is in {directory}")
        else:
            shutil.rmtree(directory, ignore_errors=True)
        if not keep:
            shutil.rmtree(environments / f"{release.torch}-py{release.python}", ignore_errors=True)
    label = f"{environment.torch} ({NEWEST})" if release.torch == NEWEST else environment.torch
    return (label, release.python, *cells)


def _agents(store: Path) -> list[int]:
    """Returns the agents that jobs of this memory have left: one outlives a job that failed."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            words = path.read_bytes()
            if b"rekindle.agent" in words and os.fsencode(store) in words:
                found.append(int(path.parent.name))
    return found


def _cell(name: str, place: Place) -> str:
    began = time.monotonic()
    try:
        seen = CASES[name](place)
    except AssertionError as error:
        seen = f"**fails**: {str(error).splitlines()[0] if str(error) else 'see the output'}"
    click.echo(f"  {name}: {seen} ({time.monotonic() - began:.0f} s)")
    return seen


def _is_bad(cell: str) -> bool:
    return cell.startswith(("**fails**", _GONE))


def _publish(row: Row) -> None:
    """Puts a row into the page, in place of that of the same release and Python, in the order of the releases."""
    known = {tuple(cells[:2]): tuple(cells) for cells in map(_cells, _DOCS.read_text().splitlines()) if cells}
    row = tuple(cell.replace("|", "/").replace("\n", " ") for cell in row)
    if row[0].endswith(f"({NEWEST})"):
        known = {key: cells for key, cells in known.items() if not key[0].endswith(f"({NEWEST})")}
    known[row[:2]] = row
    rows = sorted(known.values(), key=lambda cells: (_numbers(cells[0]), NEWEST in cells[0], _numbers(cells[1])))
    cells = [cell for each in rows for cell in each[2:]]
    bad = sum(map(_is_bad, cells))
    head = f"- {len(cells)} cells, {len(cells) - bad} as promised, {bad} not"
    put(_DOCS, "releases", "\n".join([head, "", _line(_HEADS), _line(("---",) * len(_HEADS)), *map(_line, rows)]))


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(" ")[0].split(".") if part.isdecimal()]


def _line(cells: Row) -> str:
    return f"| {' | '.join(cells)} |"


def _cells(line: str) -> list[str]:
    """Returns the cells of a row of the table; none for any other line."""
    cells = [cell.strip() for cell in line.strip("|").split(" | ")]
    return cells if len(cells) == len(_HEADS) and cells[0][:1].isdigit() else []


if __name__ == "__main__":
    main()
