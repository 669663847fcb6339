"""What all commands have in common: arguments, tables, JSON, progress bars."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn
from rich.table import Table

from rekindle.snapshot.names import root_path

__all__ = ["JSON", "MEMORY", "ROOT", "STEP", "bar_of", "print_json", "show", "table_of", "to_root"]


def to_root(_ctx: click.Context, _param: click.Parameter, value: str | None) -> Path | None:
    return None if value is None else root_path(value)


ROOT = click.argument("root", callback=to_root)
STEP = click.argument("step", type=click.IntRange(min=0), required=False)
JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON for programs.")
MEMORY = click.option("--memory", type=click.Path(path_type=Path), help="Memory store; $REKINDLE_MEMORY if unset.")


def print_json(value: Any) -> None:
    click.echo(json.dumps(value, indent=2))


def table_of(*columns: str, **options: Any) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", **options)
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def show(table: Table) -> None:
    # A pipe has no width: then rows are as long as they need to be.
    Console(width=None if sys.stdout.isatty() else 4000).print(table)


def bar_of(as_json: bool) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    return Progress(*columns, console=Console(stderr=True), transient=True, disable=as_json or not sys.stderr.isatty())
