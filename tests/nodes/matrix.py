"""Every fault of several nodes with every kind of job, for real: ``python -m tests.nodes.matrix [WORDS]...``.

For root, on Linux. With WORDS only cases are run whose names have one of them: "blip" or "node lost".
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from tests.nodes.cases import CASES, Case, Unbroken, judge, play
from tests.nodes.lab import why_not
from tests.nodes.outcome import Outcome
from tests.nodes.train import KINDS
from tests.pages import put

_DOCS = Path(__file__).parents[2] / "docs" / "nodes.md"
_HEADS = ("fault", "job", "noticed, s", "secured, s", "went on from", "lost", "apart", "again, s", "")

Row = tuple[str, ...]


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("words", nargs=-1)
@click.option("--docs", is_flag=True, help="Put what was seen into docs/nodes.md. Rows of other cases stay there.")
def main(words: tuple[str, ...], docs: bool) -> None:
    if reason := why_not():
        raise click.ClickException(reason)
    place = Path(tempfile.mkdtemp(prefix="rekindle-nodes-"))
    try:
        rows = list(_rows(words, place))
    finally:
        shutil.rmtree(place, ignore_errors=True)
    table = Table(*_HEADS)
    for row in rows:
        table.add_row(*row)
    Console(width=None if sys.stdout.isatty() else 200).print(table)
    bad = sum(row[-1] != "ok" for row in rows)
    if docs:
        _publish(rows)
    if bad:
        raise click.ClickException(f"{bad} of {len(rows)} cells are wrong")


def _publish(seen: list[Row]) -> None:
    """Puts rows into the page, in the order of the cases, in place of those of the same case and kind."""
    known = {tuple(cells[:2]): tuple(cells) for cells in map(_cells, _DOCS.read_text().splitlines()) if cells}
    known |= {row[:2]: row for row in seen}
    rows = [known[key] for case in CASES.values() for kind in KINDS if (key := (case.name, kind)) in known]
    good = sum(row[-1] == "ok" for row in rows)
    lines = [f"- {len(rows)} cells, {good} as promised", "", _line(_HEADS), _line(("---",) * len(_HEADS))]
    put(_DOCS, "matrix", "\n".join([*lines, *map(_line, rows)]))


def _line(row: Row) -> str:
    return f"| {' | '.join(row)} |"


def _cells(line: str) -> list[str]:
    """The cells of a row of this page's table of cases; none if it is another line."""
    cells = line.removeprefix("| ").removesuffix(" |").split(" | ")
    return cells if len(cells) == len(_HEADS) and cells[0] in CASES else []


def _rows(words: tuple[str, ...], place: Path) -> Iterator[Row]:
    unbroken = Unbroken(place / "unbroken")
    cells = [(case, kind) for case in CASES.values() if _is_meant(case, words) for kind in case.all_kinds]
    for number, (case, kind) in enumerate(cells):
        directory = place / str(number)
        directory.mkdir()
        try:
            out = play(case, kind, directory)
            wrong = judge(case, kind, out, unbroken.digests(kind, case.world, case.steps, case.width), slack=0.0)
        except AssertionError as error:
            out, wrong = Outcome(), [str(error)]
            click.echo(str(error)[-6000:], err=True)
        row = _texts(case, kind, out, wrong)
        click.echo(f"{number + 1} of {len(cells)}: {', '.join(row)}", err=True)
        yield row


def _is_meant(case: Case, words: tuple[str, ...]) -> bool:
    return not words or any(one in case.name for one in words)


def _texts(case: Case, kind: str, out: Outcome, wrong: list[str]) -> Row:
    def seconds(value: float | None) -> str:
        return "-" if value is None else f"{value:.2f}"

    signs = [(name, min(found.values()), " (silent)") for name, found in out.silent.items()]
    signs += [(name, at, "") for name, (at, _) in out.noticed.items()]
    noticed = ", ".join(f"{name[4:].upper()} {at:.2f}{words}" for name, at, words in sorted(signs))
    where = f"{out.resumed}, {' and '.join(dict.fromkeys(out.places))}" if out.restarts else "-"
    again = seconds(out.again) if out.restarts else "-"
    said = "; ".join(line.splitlines()[0][:120] for line in wrong if line) or "ok"
    return case.name, kind, noticed or "-", seconds(out.secured), where, str(out.lost), str(out.interval), again, said


if __name__ == "__main__":
    main()
