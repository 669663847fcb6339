"""Provides the parts that all commands share: arguments, tables, JSON, progress bars."""

from __future__ import annotations

import itertools
import json
import os
import sys
import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
from click.shell_completion import CompletionItem
from rich.console import Console, RenderableType
from rich.filesize import decimal
from rich.markup import escape
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TransferSpeedColumn,
)
from rich.table import Table
from rich.text import Text

from rekindle.common.timeouts import with_timeout
from rekindle.format.names import Root, canonical_root
from rekindle.memory.job import JobInfo

__all__ = [
    "JSON_OPTION",
    "MEMORY_OPTION",
    "ANSWERS_WITHIN",
    "ROOT_ARGUMENT",
    "STEP_ARGUMENT",
    "DrainDisplay",
    "WaitDisplay",
    "asks_for_json",
    "progress_bar",
    "complete_directory",
    "waiting_for",
]
__all__ += ["make_facts_table", "local_time", "escaped", "print_json", "show", "make_table", "parse_root"]

_LINKS = 3.0
"""Seconds to follow the links in a root's path."""
_WORD = 10
"""Fewest columns to which a column that may be folded is cut: nearly all words fit into them."""
_TELL_FIRST, _TELL_EVERY = 1.0, 10.0
"""Seconds after which a wait is worth a line, and between the lines."""
ANSWERS_WITHIN = 10.0
"""Seconds that storage gets to answer before a command fails with a timeout."""


def parse_root(_ctx: click.Context, _param: click.Parameter, value: str | None) -> Root | None:
    """Turns the argument ROOT into a root, in bounded time."""
    if value is None:
        return None
    try:
        return with_timeout(_LINKS, value, lambda: canonical_root(value))
    except TimeoutError:  # storage hangs; the command may still read memory
        return Path(os.path.abspath(os.path.expanduser(value)))


def complete_directory(_ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Lets the shell complete a root by itself."""
    return [CompletionItem(incomplete, type="dir")]


ROOT_ARGUMENT = click.argument("root", callback=parse_root, shell_complete=complete_directory)
STEP_ARGUMENT = click.argument("step", type=click.IntRange(min=0), required=False)
JSON_OPTION = click.option("--json", "as_json", is_flag=True, help="Print JSON for programs.")
MEMORY_OPTION = click.option(
    "--memory", type=click.Path(path_type=Path), help="Memory store; $REKINDLE_MEMORY if unset."
)


def asks_for_json(arguments: Sequence[str]) -> bool:
    """True if a command line asks for JSON. Needed before it is parsed, for errors of parsing."""
    ours = itertools.takewhile(lambda argument: argument != "--", arguments)
    return bool(arguments) and arguments[0] != "run" and "--json" in ours  # after run it may be the script's option


def print_json(value: Any) -> None:
    """Prints a value as JSON, for programs."""
    click.echo(json.dumps(value, indent=2))


def local_time(seconds: float | None) -> str:
    """Formats a time in seconds since 1970 in this machine's time zone; a dash for None."""
    return "-" if seconds is None else time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


class _Table(Table):
    """A table that shows texts literally: no markup, and control characters escaped."""

    def add_row(self, *cells: Any, **options: Any) -> None:
        super().add_row(*map(escaped, cells), **options)


def escaped(text: str) -> Text:
    """Returns a text to be shown literally, with control characters escaped, folded at the line's end."""
    spelt = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    return Text(spelt, overflow="fold")


def make_table(*columns: str, may_fold: Collection[str] | None = None) -> Table:
    """Returns an empty table. In a narrow terminal only the columns of ``may_fold`` are folded; by default all are."""
    table = _Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        folds = may_fold is None or column in may_fold
        table.add_column(column, overflow="fold", no_wrap=not folds, min_width=_WORD if may_fold and folds else None)
    return table


def make_facts_table(facts: Mapping[str, str]) -> Table:
    """Returns a table with a line for each name and its fact."""
    table = _Table(box=None, pad_edge=False, show_header=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, fact in facts.items():
        table.add_row(name, fact)
    return table


def show(what: RenderableType) -> None:
    """Prints a table or a group of them."""
    # A pipe has no width: then rows are as long as they need to be.
    Console(width=None if sys.stdout.isatty() else 4000).print(what)


def progress_bar(*, hidden: bool = False) -> Progress:
    """Returns a progress bar on stderr. It shows nothing if ``hidden``, and where stderr is no terminal."""
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    return Progress(*columns, console=Console(stderr=True), transient=True, disable=hidden or not sys.stderr.isatty())


@contextmanager
def waiting_for(root: Root) -> Iterator[None]:
    """Shows at a terminal, on stderr, that a command waits for storage, once the block has taken a second.

    The block prints nothing.
    """
    if not sys.stderr.isatty():
        yield
        return
    over = threading.Event()

    def show() -> None:
        if over.wait(_TELL_FIRST):
            return
        columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
        with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
            bar.add_task(escape(escaped(f"waiting for {root}").plain), total=None)
            over.wait()

    thread = threading.Thread(target=show, name="rekindle-waiting", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


class WaitDisplay:
    """Shows what a command waits for: a bar at a terminal, and a line now and then on any stderr."""

    def __init__(self, bar: Progress, name: str, timeout: float) -> None:
        self._bar, self._name = bar, name
        self._task = bar.add_task("carrying to storage", total=None)
        self._began = time.monotonic()
        self._ends, self._tell_at = self._began + timeout, self._began + _TELL_FIRST

    def show(self, carried: str | None, done: int, total: int, why: str) -> None:
        """Shows how much storage has of ``carried``, if that is something, and why the wait has not ended."""
        if carried is not None:
            self._bar.update(self._task, description=f"{escape(escaped(carried).plain)} to storage")
        self._bar.update(self._task, completed=done, total=total or None)
        now = time.monotonic()
        if now >= self._tell_at:
            self._tell_at = now + _TELL_EVERY
            line = f"{self._name}: {why}; waits {max(0.0, self._ends - now):.0f} s more at most"
            self._bar.console.print(escaped(line), soft_wrap=True)


class DrainDisplay(WaitDisplay):
    """Shows what ``stop`` waits for."""

    def __init__(self, bar: Progress, name: str, timeout: float, job: JobInfo | None) -> None:
        super().__init__(bar, name, timeout)
        self._job = job

    def __call__(self, progress: Mapping[str, Any]) -> None:
        """Shows the drain's progress."""
        step = None if progress["step"] is None else f"step {progress['step']}"
        self.show(step, progress["done"], progress["total"], self._what(progress))

    def _what(self, progress: Mapping[str, Any]) -> str:
        if progress["error"]:
            return f"storage takes nothing: {progress['error']}"
        if progress["step"] is None:
            away = self._job is not None and len(self._job.ranks) < self._job.world
            return "the other nodes have not finished their parts" if away else "its agent has not finished yet"
        rate = progress["done"] / max(time.monotonic() - self._began, _TELL_FIRST)
        limit = self._job.drain_limit if self._job is not None else None
        held = f", as its drain_limit is {decimal(limit)}/s" if limit is not None else ""
        done, total = decimal(progress["done"]), decimal(progress["total"])
        return f"storage has {done} of {total} of step {progress['step']}, {decimal(int(rate))}/s{held}"
