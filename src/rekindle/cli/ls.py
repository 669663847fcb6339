"""Defines the command ``ls``."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
from rich.filesize import decimal
from rich.table import Table

from rekindle.cli.files import list_command
from rekindle.cli.other_memory import OtherMemory, look_at_others
from rekindle.cli.terminal import (
    ANSWERS_WITHIN,
    JSON_OPTION,
    MEMORY_OPTION,
    complete_directory,
    local_time,
    make_table,
    parse_root,
    print_json,
    show,
    waiting_for,
)
from rekindle.errors import FormatError, NotFoundError, RekindleError
from rekindle.format.lineage import drop_superseded, superseded_by
from rekindle.format.metric import best_of
from rekindle.format.names import Root
from rekindle.memory.job_dir import JobDir, memory_base
from rekindle.memory.notes import SafeStep
from rekindle.storage.catalog import MEMORY, PEER, STORAGE, StoredCopy
from rekindle.storage.listing import ListedCopy, list_copies_within

__all__ = ["Row", "find_rows", "ls_command", "make_rows"]

_NEAREST_FIRST = {MEMORY: 0, PEER: 1, STORAGE: 2}


@dataclass(frozen=True)
class Row:
    """One copy of a checkpoint: in this node's memory, in that of the other nodes, or on storage."""

    entry: ListedCopy
    node_safe: bool
    """True of the newest step that survives the loss of any one node."""
    durable: bool
    nodes: list[str] = field(default_factory=list)
    """Names of the nodes that hold a part of it in memory; none of a job on one node."""
    missing: list[str] = field(default_factory=list)
    """Names of the nodes whose memory lacks their own part."""
    best: bool = False
    """True of the best durable one by its metric."""

    @property
    def condition(self) -> str:
        """Words for the table."""
        marks = [("node-safe", self.node_safe), ("pinned", self.entry.copy.pinned), ("best", self.best)]
        return ", ".join([self.entry.condition, *(word for word, holds in marks if holds)])

    @property
    def size(self) -> str:
        """Words for the table. Other nodes only list what they have."""
        return "-" if self.entry.copy.place == PEER else decimal(self.entry.nbytes)

    def to_json(self) -> dict[str, Any]:
        away = {"bytes": None, "path": None} if self.entry.copy.place == PEER else {}
        metric = self.entry.copy.metric
        marks: dict[str, Any] = {"node_safe": self.node_safe, "durable": self.durable, "best": self.best}
        marks["metric"] = None if metric is None else metric._asdict()
        return {**self.entry.to_json(), **away, **marks, "nodes": self.nodes, "missing": self.missing}


@click.command("ls", short_help="List checkpoints, on storage and in the memory of the job's nodes.")
@click.argument("root", required=False, callback=parse_root, shell_complete=complete_directory)
@click.option("--files", is_flag=True, help="List the files that rekindle.save has put into this node's memory.")
@JSON_OPTION
@MEMORY_OPTION
def ls_command(root: Root | None, files: bool, as_json: bool, memory: Path | None) -> None:
    """List the checkpoints of ROOT: on storage, in this node's memory, and in that of the job's other nodes."""
    if files and root is not None:
        raise click.UsageError("give either ROOT or --files")
    if files:
        list_command(memory, as_json=as_json)
        return
    if root is None:
        raise click.UsageError("Missing argument 'ROOT'; or give --files")
    with waiting_for(root):
        rows, others, trouble = find_rows(root, memory_base(memory))
    if as_json:
        print_json([row.to_json() for row in rows])
    else:
        show(_table(rows))
    _tell_of_unknown(others)
    if trouble is not None:
        raise trouble
    if others is not None and others.silent and JobDir.of(root, memory_base(memory)).trainers():
        raise RekindleError(f"{root}: not all nodes have told what their memory holds")


def find_rows(root: Root, base: Path) -> tuple[list[Row], OtherMemory | None, OSError | RekindleError | None]:
    """Returns every copy of every checkpoint, newest first, what other nodes have told, and storage's error.

    Raises NotFoundError when there is none.
    """
    job = JobDir.of(root, base)
    try:
        listed, trouble = list_copies_within(root, base, ANSWERS_WITHIN)
        others = look_at_others(job)
    except NotFoundError:
        others = look_at_others(job)
        if others is None or not others.held:
            raise
        listed, trouble = [], None
    return make_rows(listed, others, _safe_step(job)), others, trouble


def make_rows(listed: list[ListedCopy], others: OtherMemory | None, safe: SafeStep | None) -> list[Row]:
    """Adds the memory of other nodes to what this node sees. Newest first, memory before storage."""
    damaged = [entry for entry in listed if not entry.copy.world]
    sound = [entry for entry in listed if entry.copy.world]
    if others is not None:
        sound += _list_peers(listed, others)
    sound.sort(key=lambda entry: _NEAREST_FIRST[entry.copy.place])
    sound.sort(key=lambda entry: entry.copy.checkpoint, reverse=True)
    durable = {entry.copy.checkpoint for entry in listed if entry.copy.place == STORAGE}
    here = {entry.copy.checkpoint: entry.copy.ranks for entry in listed if entry.copy.place == MEMORY}
    best = best_of(
        drop_superseded([entry.copy for entry in listed if entry.copy.place == STORAGE and entry.copy.world])
    )
    rows = []
    for entry in [*sound, *damaged]:
        copy, key = entry.copy, entry.copy.checkpoint
        nodes: list[str] = []
        missing: list[str] = []
        if others is not None and copy.place != STORAGE:
            nodes = others.holding(key) if copy.place == PEER else [others.nodes.here.name]
            missing = others.without(key, copy.world, here.get(key, frozenset()))
        is_safe = safe is not None and (safe.start, safe.step) == (copy.incarnation.id, copy.step)
        rows.append(Row(entry, is_safe, key in durable, nodes, missing, best=copy is best))
    return rows


def _safe_step(job: JobDir) -> SafeStep | None:
    """Returns the newest step that survives the loss of any one node; None if there is none.

    That of a former start was safe on the nodes of that one, of which one may have been lost since.
    """
    info, marks = None, job.notes.marks()
    with suppress(FormatError):
        info = job.read_job()
    safe = marks.safe if marks is not None else None
    return safe if safe is not None and info is not None and safe.start == info.start else None


def _list_peers(listed: list[ListedCopy], others: OtherMemory) -> list[ListedCopy]:
    copies = others.copies()
    seen = {copy.incarnation for copy in copies} | {entry.copy.incarnation for entry in listed}

    def condition(copy: StoredCopy) -> str:
        if superseded_by(copy.step, copy.incarnation, seen):
            return "abandoned"
        return "complete" if others.is_complete(copy) else "incomplete"

    return [ListedCopy(copy, 0, condition(copy)) for copy in copies]


def _table(rows: list[Row]) -> Table:
    columns = ["step", "saved", "where", "condition", "ranks", "size", "start"]
    measured = any(row.entry.copy.metric for row in rows)
    if measured:
        columns.insert(4, "metric")
    lacking = any(row.missing for row in rows)
    if lacking:
        columns.append("missing on")
    table = make_table(*columns, may_fold=("condition", "start", "missing on"))
    for row in rows:
        copy = row.entry.copy
        parent = f"step {copy.incarnation.parent_step}" if copy.incarnation.parent else "scratch"
        cells = [
            str(copy.step),
            local_time(row.entry.saved_at),
            copy.place,
            row.condition,
            f"{len(copy.ranks)} of {copy.world}",
            row.size,
            f"{copy.incarnation.generation}, from {parent}",
        ]
        if measured:
            cells.insert(4, str(copy.metric or "-"))
        table.add_row(*cells, *([", ".join(row.missing) or "-"] if lacking else []))
    return table


def _tell_of_unknown(others: OtherMemory | None) -> None:
    """Names the nodes whose memory is not in the list."""
    if others is not None:
        for name in others.unreached:
            click.echo(f"{name}: its memory is not listed, as other nodes can't reach its agent", err=True)
        for name, why in others.silent.items():
            click.echo(f"{name}: its memory is not listed: {why}", err=True)
