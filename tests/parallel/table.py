"""Every kind of parallelism restored as every other, for real: ``python -m tests.parallel.table``.

Without ``--full`` the short table that the tests run too; ``--docs`` puts what was seen into docs/parallel.md.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import click
from rich.console import Console
from rich.progress import track
from rich.table import Table

from tests.pages import put
from tests.parallel.cells import PLACES, TOLERANCE, Cell, every_cell, judge, loss_error, short_cells
from tests.parallel.jobs import SAVED, Resumed, Saved, resume, save
from tests.parallel.kinds import KINDS
from tests.parallel.written import read

__all__ = ["main"]

_DOCS = Path(__file__).parents[2] / "docs" / "parallel.md"
_WORLDS = (1, 2, 3, 4)


@dataclass
class Row:
    """What became of one cell."""

    cell: Cell
    wrong: list[str]
    bitwise: bool = False
    """Whether the losses are those of the unbroken run, bit for bit."""
    error: float = 0.0

    @property
    def mark(self) -> str:
        return "✗" if self.wrong else "=" if self.bitwise else "≈"


@dataclass
class Cost:
    """What one rank's, and all ranks', files of a checkpoint hold."""

    kind: str
    ranks: int
    once: int
    """Bytes of all that is not a rank's own, each element counted once."""
    written: int
    """The same as it was written."""
    own: int
    """Bytes of what each rank has of its own."""
    messages: int
    """Collectives and messages of all saves."""


@dataclass
class Seen:
    rows: list[Row] = field(default_factory=list)
    costs: list[Cost] = field(default_factory=list)

    @property
    def bad(self) -> list[Row]:
        return [row for row in self.rows if row.wrong]


def see(cells: list[Cell], place: Path, memory: Path) -> Seen:
    """Run all cells, those that start from the same checkpoint one after the other."""
    seen = Seen()
    known: dict[tuple[str, int], Saved] = {}
    last = {(cell.kind, cell.ranks): cell for cell in cells}
    for cell in _progress(sorted(cells, key=lambda c: (list(KINDS).index(c.kind), c.ranks))):
        source = cell.kind, cell.ranks
        try:
            if source not in known:
                known[source] = save(*source, place, memory)
                seen.costs.append(_cost(known[source]))
            seen.rows.append(_row(cell, known[source], resume(known[source], *_new(cell), place, memory)))
        except AssertionError as error:
            seen.rows.append(Row(cell, [str(error)[-500:]]))
        if last[source] == cell and source in known:
            known.pop(source).stores.remove()
    return seen


def _new(cell: Cell) -> tuple[str, int, str]:
    return cell.new_kind, cell.new_ranks, cell.place


def _row(cell: Cell, saved: Saved, resumed: Resumed) -> Row:
    wrong = judge(cell, saved, resumed)
    if resumed.error:
        return Row(cell, wrong)
    error = loss_error(saved, resumed)
    return Row(cell, wrong, error == 0.0, error)


def _cost(saved: Saved) -> Cost:
    written = read(saved.stores.root / f"step-{SAVED:010}")
    once = sum(tensor.nbytes for tensor in written.tensors.values())
    own = sum(part.nbytes for parts in written.own.values() for part in parts.values())
    sent = sum(sum(after) - sum(before) for answer in saved.answers for before, after in answer["messages"])
    return Cost(saved.kind, saved.world, once, sum(written.nbytes.values()), own, sent)


def _progress(todo: list[Cell]) -> Iterator[Cell]:
    """A bar on a terminal, else a line now and then."""
    if sys.stderr.isatty():
        yield from track(todo, console=Console(stderr=True))
        return
    for number, one in enumerate(todo):
        if number % 20 == 0:
            click.echo(f"{number} of {len(todo)} cells done", err=True)
        yield one


# -- showing --------------------------------------------------------------------------------------------------------

Lines = list[list[str]]


def _summary(seen: Seen) -> list[str]:
    bitwise = sum(row.bitwise and not row.wrong for row in seen.rows)
    return [
        f"{len(seen.rows)} cells, {len(seen.rows) - len(seen.bad)} as promised: every tensor and every value came back",
        f"losses of the next steps: bit for bit those of the unbroken run in {bitwise} cells, elsewhere at most "
        f"{max((row.error for row in seen.rows), default=0.0):.1e} of them away ({TOLERANCE:.0e} is allowed)",
        f"{len(seen.costs)} jobs of {SAVED} saves each: {sum(cost.messages for cost in seen.costs)} collectives or "
        "messages in all of them",
    ]


def _alike(seen: Seen) -> tuple[list[str], Lines]:
    heads = ["kind", "saved on", *(f"restored on {world}" for world in _WORLDS)]
    lines = []
    for kind, worlds in KINDS.items():
        for ranks in worlds:
            line = [kind, str(ranks)]
            for new in _WORLDS:
                line.append(_marks(seen, kind, ranks, kind, new) if new in worlds else "-")
            lines.append(line)
    return heads, lines


def _across(seen: Seen) -> tuple[list[str], Lines]:
    lines = []
    for kind in KINDS:
        line = [kind]
        for new in KINDS:
            found = [r for r in seen.rows if kind != new and (r.cell.kind, r.cell.new_kind) == (kind, new)]
            worlds = sorted({f"{r.cell.ranks}→{r.cell.new_ranks}" for r in found})
            line.append(f"{', '.join(worlds)} {_both(found)}".strip() if kind != new else "-")
        lines.append(line)
    return ["saved by", *KINDS], lines


def _costs(seen: Seen) -> tuple[list[str], Lines]:
    heads = ["kind", "ranks", "state", "written", "own, all ranks", "messages"]
    return heads, [
        [c.kind, str(c.ranks), f"{c.once:,}", f"{c.written:,}", f"{c.own:,}", str(c.messages)] for c in seen.costs
    ]


def _marks(seen: Seen, kind: str, ranks: int, new: str, new_ranks: int) -> str:
    return _both([r for r in seen.rows if _shape(r.cell) == (kind, ranks, new, new_ranks)])


def _shape(cell: Cell) -> tuple[str, int, str, int]:
    return cell.kind, cell.ranks, cell.new_kind, cell.new_ranks


def _both(rows: list[Row]) -> str:
    """Marks of memory and storage, once where they are alike; nothing where none was run."""
    marks = [next((r.mark for r in rows if r.cell.place == place), "") for place in PLACES]
    return marks[0] if marks[0] == marks[1] else " ".join(f"{m} {p}" for m, p in zip(marks, PLACES, strict=True) if m)


def _markdown(heads: list[str], lines: Lines) -> list[str]:
    return ["| " + " | ".join(line) + " |" for line in [heads, ["---"] * len(heads), *lines]]


def _into_docs(seen: Seen) -> None:
    parts: dict[str, list[str]] = {
        "summary": [f"- {line}" for line in _summary(seen)],
        "alike": _markdown(*_alike(seen)),
        "across": _markdown(*_across(seen)),
        "costs": _markdown(*_costs(seen)),
        "wrong": [f"- {row.cell}: {row.wrong[0][:300]}" for row in seen.bad] or ["Nothing."],
    }
    for mark, lines in parts.items():
        put(_DOCS, mark, "\n".join(lines))


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--full", is_flag=True, help="Every kind on every number of ranks, and as every other kind.")
@click.option("--only", metavar="KIND", help="Cells in which this kind saves or restores.")
@click.option("--docs", is_flag=True, help="Put what was seen into docs/parallel.md.")
def main(full: bool, only: str | None, docs: bool) -> None:
    cells = every_cell() if full else list(short_cells())
    cells = [cell for cell in cells if only is None or only in (cell.kind, cell.new_kind)]
    place = Path(tempfile.mkdtemp(prefix="rekindle-table-"))
    memory = Path(tempfile.mkdtemp(prefix="rekindle-table-", dir="/dev/shm" if os.path.isdir("/dev/shm") else None))
    try:
        seen = see(cells, place, memory)
    finally:
        shutil.rmtree(place, ignore_errors=True)
        shutil.rmtree(memory, ignore_errors=True)
    console = Console(width=None if sys.stdout.isatty() else 200)
    for heads, lines in (_alike(seen), _across(seen), _costs(seen)):
        table = Table(*heads)
        for line in lines:
            table.add_row(*line)
        console.print(table)
    click.echo("\n".join(_summary(seen)))
    for row in seen.bad:
        click.echo(f"{row.cell}: {'; '.join(row.wrong)[:1000]}")
    if docs:
        _into_docs(seen)
    if seen.bad:
        raise click.ClickException(f"{len(seen.bad)} of {len(seen.rows)} cells are wrong")


if __name__ == "__main__":
    main()
