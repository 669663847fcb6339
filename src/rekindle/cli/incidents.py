"""Defines the command ``incidents``, and the tables in which a drill and the demo show an incident, too."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import click
from rich.console import Group, RenderableType
from rich.table import Table

from rekindle.cli.goodput import Totals, add_up
from rekindle.cli.terminal import (
    ANSWERS_WITHIN,
    JSON_OPTION,
    MEMORY_OPTION,
    ROOT_ARGUMENT,
    local_time,
    make_table,
    print_json,
    show,
    waiting_for,
)
from rekindle.common.timeouts import with_timeout
from rekindle.errors import FormatError, NotFoundError
from rekindle.format.names import Root
from rekindle.memory.incident import (
    FIRST_STEP,
    FORMED,
    GONE,
    NOTICED,
    RESTORED,
    RUNNING,
    SECURED,
    STARTED,
    Incident,
)
from rekindle.memory.incidents import describe_stretch, incident_files, read_incident
from rekindle.memory.job_dir import JobDir, memory_base
from rekindle.storage.incidents import load_incidents
from rekindle.storage.listing import iso_time, root_hint
from rekindle.storage.open import open_store

__all__ = ["collect_incidents", "find_incidents", "incidents_command", "make_incident_tables", "summarize"]

_PARTS = {
    NOTICED: "noticed",
    SECURED: "secured",
    GONE: "ended",
    STARTED: "started",
    FORMED: "met",
    RESTORED: "restored",
    FIRST_STEP: "first step",
}
"""The parts of a recovery, and the headings of their columns."""


@click.command("incidents", short_help="List the faults that struck a job, and what each of them cost.")
@ROOT_ARGUMENT
@JSON_OPTION
@MEMORY_OPTION
def incidents_command(root: Root, as_json: bool, memory: Path | None) -> None:
    """List the faults that struck the job of ROOT: cause, steps lost, and the seconds of each part of the recovery.

    \b
    noticed     from the fault, where its moment is known, to its notice
    secured     until the last surviving rank had secured its state
    ended       until the last process had ended
    started     until the next start's first process was started
    met         until its ranks had met
    restored    until the state was restored
    first step  until the first new step was complete
    in all      from the fault, or from its notice, to the first new step

    Each host has a line of its own, timed by its own clock. Goodput is the share of time in which steps were made that
    were kept.
    """
    with waiting_for(root):
        records, problems, trouble = collect_incidents(root, memory_base(memory))
    totals = add_up(records)
    faults = [record for record in records if record.is_fault]
    if as_json:
        stretches = [_to_json(record) for record in records if not record.is_fault]
        found = {"incidents": [_to_json(record) for record in faults], "stretches": stretches}
        print_json({**found, "totals": totals.to_json()})
    elif faults:
        show(Group(*make_incident_tables(faults), "", summarize(totals)))
    elif trouble is None:
        click.echo(f"{root}: no fault is recorded")
    for problem in problems:
        click.echo(f"skipped: {problem}", err=True)
    if trouble is not None:
        raise trouble


def _to_json(record: Incident) -> dict[str, Any]:
    return {**record.to_json(), "at": iso_time(record.at)}


def collect_incidents(root: Root, base: Path) -> tuple[list[Incident], list[str], OSError | None]:
    """Returns all records of memory and storage, oldest first; words on what is none; storage's error, if any."""
    job, trouble = JobDir.of(root, base), None
    job.check()
    records, problems = find_incidents(job)
    stored: list[Incident] = []
    try:
        stored, torn = with_timeout(ANSWERS_WITHIN, root, lambda: load_incidents(open_store(root)))
        problems += torn
        if not stored and not job.path.is_dir() and not with_timeout(ANSWERS_WITHIN, root, open_store(root).published):
            raise NotFoundError(f"{root}: no job{root_hint(root, base)}")
    except NotFoundError:
        raise
    except OSError as error:
        trouble = error
    merged = {record.name: record for record in [*stored, *records]}  # memory is ahead of storage
    return sorted(merged.values(), key=lambda one: one.order), problems, trouble


def find_incidents(job: JobDir) -> tuple[list[Incident], list[str]]:
    """Returns the records that memory has, and words on damaged ones. A job that trains adds its stretch up to now."""
    records, problems = [], []
    for path in incident_files(job):
        with suppress(FileNotFoundError):
            try:
                records.append(read_incident(path))
            except FormatError as error:
                problems.append(f"{path} {error}")
    running = describe_stretch(job, RUNNING) if job.trainers() else None
    return records + ([running] if running is not None else []), problems


def make_incident_tables(incidents: Sequence[Incident]) -> list[RenderableType]:
    """Returns a table of what has happened, and one of the seconds that each part of the recovery took."""
    happened = make_table("", "when", "cause", "rank", "host", "step", "lost", "from", "start", may_fold=("host",))
    took = make_table("", *_PARTS.values(), "in all")
    for number, one in enumerate(incidents, 1):
        happened.add_row(
            str(number),
            local_time(one.at),
            one.cause,
            _number(one.rank),
            one.host,
            _number(one.step),
            "-" if one.lost is None else str(one.lost),
            one.place or "-",
            _start(one),
        )
        parts = one.parts()
        took.add_row(str(number), *(_seconds(parts[name]) for name in _PARTS), _seconds(one.outage))
    return [happened, "", _titled(took)]


def _titled(table: Table) -> Table:
    table.title, table.title_justify, table.title_style = "seconds of each part", "left", ""
    return table


def _number(value: int) -> str:
    return "-" if value < 0 else str(value)


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _start(one: Incident) -> str:
    """Describes the start after an incident."""
    if STARTED not in one.moments:
        return "-"
    words = "warm" if one.warm else "cold"
    return words if one.starts in (None, 1) else f"{words}, {one.starts} tries"


def summarize(totals: Totals) -> str:
    """Returns the totals in words."""
    what = "1 incident" if totals.incidents == 1 else f"{totals.incidents} incidents"
    lines = [f"{what}, {totals.lost} completed {'step' if totals.lost == 1 else 'steps'} computed again"]
    if totals.median_outage is not None and totals.longest_outage is not None:
        lines.append(
            f"from fault to first new step: median {totals.median_outage:.2f} s, longest {totals.longest_outage:.2f} s"
        )
    if totals.unrecovered:
        lines.append(f"without a new step since: {totals.unrecovered}")
    if totals.goodput is not None:
        lines.append(f"goodput: {totals.goodput:.1%}, {totals.productive:.1f} s of {totals.wall:.1f} s")
    if totals.left_out:
        lines.append(f"left out of goodput, as not all of it is known: {totals.left_out} of the records")
    return "\n".join(lines)
