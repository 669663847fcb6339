"""What all commands have in common: arguments, tables, JSON, progress bars."""

from __future__ import annotations

import itertools
import json
import os
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import click
from click.shell_completion import CompletionItem
from rich.console import Console, RenderableType
from rich.filesize import decimal
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn
from rich.table import Table
from rich.text import Text

from rekindle.common.timeouts import with_timeout
from rekindle.format.names import Root, canonical_root
from rekindle.memory.job import JobInfo

__all__ = [
    "JSON",
    "MEMORY",
    "PATIENCE",
    "ROOT",
    "STEP",
    "DrainDisplay",
    "asks_for_json",
    "progress_bar",
    "complete_directory",
]
__all__ += ["make_facts_table", "local_time", "escaped", "print_json", "show", "make_table", "parse_root"]

_LINKS = 3.0
"""Seconds to follow the links in a root's path."""
_WORD = 10
"""Columns that a word takes, or nearly all do: what may be folded is not cut to less."""
_TELL_FIRST, _TELL_EVERY = 1.0, 10.0
"""Seconds after which a wait is worth a line, and between the lines."""
PATIENCE = 10.0
"""Seconds that storage gets to say what there is, before a person is told that it doesn't."""


def parse_root(_ctx: click.Context, _param: click.Parameter, value: str | None) -> Root | None:
    if value is None:
        return None
    try:
        return with_timeout(_LINKS, value, lambda: canonical_root(value))
    except TimeoutError:  # memory may still be asked
        return Path(os.path.abspath(os.path.expanduser(value)))


def complete_directory(_ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Lets the shell complete a root by itself."""
    return [CompletionItem(incomplete, type="dir")]


ROOT = click.argument("root", callback=parse_root, shell_complete=complete_directory)
STEP = click.argument("step", type=click.IntRange(min=0), required=False)
JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON for programs.")
MEMORY = click.option("--memory", type=click.Path(path_type=Path), help="Memory store; $REKINDLE_MEMORY if unset.")


def asks_for_json(arguments: Sequence[str]) -> bool:
    """Whether a command line asks for JSON, which is needed before it has been understood."""
    ours = itertools.takewhile(lambda argument: argument != "--", arguments)
    return bool(arguments) and arguments[0] != "run" and "--json" in ours  # of a script that is run we know nothing


def print_json(value: Any) -> None:
    click.echo(json.dumps(value, indent=2))


def local_time(seconds: float | None) -> str:
    """A moment, in seconds since 1970, by this machine's clock and time zone; a dash for None."""
    return "-" if seconds is None else time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


class _Table(Table):
    """Shows texts as they are: what looks like markup is a name, and what a terminal would obey is spelt out."""

    def add_row(self, *cells: Any, **options: Any) -> None:
        super().add_row(*map(escaped, cells), **options)


def escaped(text: str) -> Text:
    """A text as it is, folded where a line ends."""
    spelt = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    return Text(spelt, overflow="fold")


def make_table(*columns: str, may_fold: Collection[str] | None = None) -> Table:
    """In a terminal that is too narrow only the columns of ``may_fold`` are folded; all of them if it is not given."""
    table = _Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        folds = may_fold is None or column in may_fold
        table.add_column(column, overflow="fold", no_wrap=not folds, min_width=_WORD if may_fold and folds else None)
    return table


def make_facts_table(facts: Mapping[str, str]) -> Table:
    """A line for each name and what there is to say of it."""
    table = _Table(box=None, pad_edge=False, show_header=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, fact in facts.items():
        table.add_row(name, fact)
    return table


def show(what: RenderableType) -> None:
    # A pipe has no width: then rows are as long as they need to be.
    Console(width=None if sys.stdout.isatty() else 4000).print(what)


def progress_bar(as_json: bool) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    return Progress(*columns, console=Console(stderr=True), transient=True, disable=as_json or not sys.stderr.isatty())


class DrainDisplay:
    """Tells a person what ``stop`` waits for: a bar at a terminal, and a line now and then wherever stderr leads."""

    def __init__(self, bar: Progress, name: str, timeout: float, job: JobInfo | None) -> None:
        self._bar, self._name, self._job = bar, name, job
        self._task = bar.add_task("carrying to storage", total=None)
        self._began = time.monotonic()
        self._ends, self._tell_at = self._began + timeout, self._began + _TELL_FIRST

    def __call__(self, progress: Mapping[str, Any]) -> None:
        """``progress`` is the drain's."""
        step = progress["step"]
        if step is not None:
            self._bar.update(self._task, description=f"step {step} to storage")
        self._bar.update(self._task, completed=progress["done"], total=progress["total"] or None)
        now = time.monotonic()
        if now >= self._tell_at:
            self._tell_at = now + _TELL_EVERY
            left = max(0.0, self._ends - now)
            line = f"{self._name}: {self._what(progress)}; waits {left:.0f} s more at most"
            self._bar.console.print(escaped(line), soft_wrap=True)

    def _what(self, progress: Mapping[str, Any]) -> str:
        if progress["error"]:
            return f"storage takes nothing: {progress['error']}"
        if progress["step"] is None:
            away = self._job is not None and len(self._job.ranks) < self._job.world
            return "the other nodes have not finished their parts" if away else "its agent is not done yet"
        rate = progress["done"] / max(time.monotonic() - self._began, _TELL_FIRST)
        limit = self._job.drain_limit if self._job is not None else None
        held = f", as its drain_limit is {decimal(limit)}/s" if limit is not None else ""
        done, total = decimal(progress["done"]), decimal(progress["total"])
        return f"storage has {done} of {total} of step {progress['step']}, {decimal(int(rate))}/s{held}"
