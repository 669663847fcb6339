"""Measures the cost of planning a read onto another shape, by the number of chunks: ``python bench/plans.py``.

Tensors are cut up for so many ranks, by rows or as a grid, and wanted whole, by one rank of three quarters as many, or,
of a grid, by all ranks of another one. ``--docs`` puts the table into docs/benchmarks.md.
"""

from __future__ import annotations

import math
import re
import resource
import statistics
import time
from collections.abc import Iterator
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from rekindle.restore.reshard import Box, Have, Want, plan

_DOCS = Path(__file__).resolve().parents[1] / "docs" / "benchmarks.md"
_TENSORS = 6
_RANKS = (256, 1024, 4096, 16384)
_ROUNDS = 3
_HEADS = ("ranks", "chunks", "whole, by rows, s", "one rank's part", "whole, by grid", "grid to columns", "MiB")


def _seconds(wants: list[Want], haves: list[Have], moves: int | None) -> float:
    """Median. ``moves``: how many there must be."""
    found = []
    for _ in range(_ROUNDS):
        began = time.perf_counter()
        made = plan(wants, haves)
        found.append(time.perf_counter() - began)
        assert not made.missing and moves in (None, len(made.moves))
    return statistics.median(found)


def _names() -> list[str]:
    return [f"layer.{number}.weight" for number in range(_TENSORS)]


def _row(ranks: int) -> tuple[str, ...]:
    rows = 4 * ranks
    by_rows = [Have(name, Box((4 * rank, 0), (4, 4096))) for rank in range(ranks) for name in _names()]
    whole = _seconds([Want(name, Box((0, 0), (rows, 4096))) for name in _names()], by_rows, len(by_rows))
    part = rows // (ranks * 3 // 4)
    one = _seconds([Want(name, Box((5 * part, 0), (part, 4096))) for name in _names()], by_rows, None)
    side = math.isqrt(ranks)
    grid = [Have(n, Box((4 * i, 4 * j), (4, 4))) for i in range(side) for j in range(side) for n in _names()]
    united = _seconds([Want(name, Box((0, 0), (4 * side, 4 * side))) for name in _names()], grid, len(grid))
    columns = [Want(name, Box((0, 4 * j), (4 * side, 4))) for j in range(side) for name in _names()]
    turned = _seconds(columns, grid, len(grid))
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
    return str(ranks), f"{len(by_rows):,}", *(f"{s:.3f}" for s in (whole, one, united, turned)), str(memory)


def _into_docs(rows: list[tuple[str, ...]]) -> None:
    lines = ["| " + " | ".join(row) + " |" for row in (_HEADS, ("---",) * len(_HEADS), *rows)]
    body = "\n".join(lines)
    marked = re.compile(r"(<!-- plans -->\n).*?(<!-- end -->)", re.DOTALL)
    _DOCS.write_text(marked.sub(lambda match: f"{match[1]}\n{body}\n\n{match[2]}", _DOCS.read_text()))


def _rows() -> Iterator[tuple[str, ...]]:
    for ranks in _RANKS:
        yield _row(ranks)


@click.command(help=__doc__)
@click.option("--docs", is_flag=True, help="Put the table into docs/benchmarks.md.")
def main(docs: bool) -> None:
    rows = list(_rows())
    table = Table(*_HEADS)
    for row in rows:
        table.add_row(*row)
    Console(width=160).print(table)
    if docs:
        _into_docs(rows)


if __name__ == "__main__":
    main()
