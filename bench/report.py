"""The tables of a run: on the terminal, and between the markers of docs/benchmarks.md."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table as RichTable
from sizes import MIB
from summary import Reach

__all__ = ["Table", "conditions", "console_table", "console_tables", "markdown", "put_blocks", "rewrite", "tables"]


class Table(NamedTuple):
    """Rows of text under a title. ``name`` is that of the markers."""

    name: str
    title: str
    columns: list[str]
    rows: list[list[str]]


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.0f}" if seconds >= 0.01 else f"{seconds * 1e3:.2f}"


def _mib(nbytes: float) -> str:
    return f"{nbytes / MIB:,.0f}"


def tables(document: dict[str, Any], rows: dict[str, list[Reach]]) -> Iterator[Table]:
    """All that there is something to say in. ``rows`` is what must be reached, by size, and for "growth"."""
    for size, found in document["sizes"].items():
        summary = found["summary"]
        made = (_stall(size, summary), _loop(size, summary), _load(size, summary), _disk(size, summary))
        yield from (table for table in (*made, _reach(size, rows[size])) if table.rows)
    if document["growth"]:
        yield _reach("growth", rows["growth"])
        yield from (table for table in _growth(document["growth"]["summary"]) if table.rows)
    skipped = [[name, reason] for name, reason in document["skipped"].items()]
    yield Table("skipped", "Left out", ["what", "why"], skipped or [["nothing", ""]])


def _stall(size: str, summary: dict[str, Any]) -> Table:
    columns = "stall, first, ms|later, ms|longest, ms|first, copies|later, copies|step longer by, ms"
    columns += "|durable, first, s|later, s|training lost, s|memory, MiB"
    rows = [
        [
            name,
            *(_ms(s[key]) for key in ("first_stall", "later_stall", "later_stall_max")),
            *(f"{s[key]:.2f}" for key in ("first_stall_per_copy", "later_stall_per_copy")),
            _ms(s["later_step_longer"]) if s["later_step_longer"] > 0 else "0",
            *(f"{s[key]:.2f}" for key in ("first_durable", "later_durable", "later_lost")),
            _mib(s["memory_peak"]),
        ]
        for name, s in summary["saves"].items()
    ]
    return Table(f"stall {size}", f"Single saves of {size}", ["contender", *columns.split("|")], rows)


def _loop(size: str, summary: dict[str, Any]) -> Table:
    rows = [
        [
            *(name, _ms(s["plain"]), f"{s['slower'] * 1e3:,.1f}", f"{s['in_copies']:.2f}", f"{s['share']:.1%}"),
            f"{s['skipped']:.0%}" if s["skipped"] else "none",
        ]
        for name, s in summary["loop"].items()
    ]
    columns = ["contender", "step, ms", "slower by, ms", "in copies", "of the step", "saves left out"]
    return Table(f"loop {size}", f"A save of {size} at every step", columns, rows)


def _load(size: str, summary: dict[str, Any]) -> Table:
    rows = [
        [way, _ms(s["cold"]), _ms(s["warm"])]
        + [f"{s[key]:.2f}" for key in ("cold_per_copy", "warm_per_copy", "cold_per_disk")]
        for way, s in summary["loads"].items()
    ]
    columns = ["way", "cold, ms", "again, ms", "cold, fresh copies", "again, copies", "cold, reads of the disk"]
    return Table(f"load {size}", f"Loads of {size}, every one verified", columns, rows)


def _disk(size: str, summary: dict[str, Any]) -> Table:
    rows = [
        [name, f"{s['durable_gb_per_s']:.2f}", f"{s['memory_held'] / MIB:,.0f}" if s["memory_held"] else ""]
        for name, s in summary["saves"].items()
    ]
    drain = summary["drain"]
    if drain:
        rows.append(["Rekindle, the drain alone", f"{drain['gb_per_s']:.2f}", ""])
        rows.append([f"the disk, {drain['by']}", f"{drain['disk_gb_per_s']:.2f}", ""])
    columns = ["contender", "GB/s until durable", "MiB held afterwards"]
    return Table(f"disk {size}", f"{size} to the disk", columns, rows)


def _reach(size: str, found: list[Reach]) -> Table:
    rows = [[row.what, row.target, row.shown, "yes" if row.met else "no"] for row in found]
    return Table(f"reach {size}", f"What it must reach, {size}", ["what", "target", "measured", "met"], rows)


def _growth(summary: dict[str, Any]) -> Iterator[Table]:
    for series in summary["tensors"]:
        rows = [
            [f"{p['tensors']:,}", *(f"{p[key] * 1e3:.2f}" for key in ("call", "stall", "at_once", "copy", "load"))]
            for p in series["points"]
        ]
        rows.append(["each more", f"{series['per_tensor'] * 1e6:.2f} µs", "", "", "", ""])
        size = f"{series['bytes'] / MIB:,.0f} MiB"
        columns = ["tensors", "step(), ms", "step() and wait", "overlap=False", "one copy", "load from storage"]
        yield Table(f"tensors {size}", f"Over tensors, {size} in all", columns, rows)
    rows = [
        [_mib(p["bytes"]), *(_ms(p[key]) for key in ("call", "stall", "at_once", "copy"))]
        + [f"{p['bytes'] / 1e9 / p[key]:.2f}" for key in ("stall", "at_once", "copy")]
        for p in summary["bytes"]
    ]
    columns = ["MiB", "step(), ms", "step() and wait", "overlap=False", "one copy"]
    columns += ["GB/s, step() and wait", "overlap=False", "one copy"]
    yield Table("bytes", "Over bytes", columns, rows)
    rows = [[str(p["ranks"]), _mib(p["bytes"]), _ms(p["stall"])] for p in summary["ranks"]]
    yield Table("ranks", "Over ranks", ["ranks", "MiB of each", "step() and wait, slowest rank, ms"], rows)
    rows = [
        [f"{p['saves']:,}", *(f"{p[key] * 1e3:.2f}" for key in ("call", "stall", "durable"))]
        for p in summary["history"]
    ]
    yield Table("history", "Over saves before", ["up to save", "step(), ms", "step() and wait", "durable, ms"], rows)


def conditions(document: dict[str, Any]) -> str:
    """One paragraph: on what, when and how."""
    machine, settings = document["machine"], document["settings"]
    cpu, kernel = f"{machine['cpu']}, {machine['cores']} cores", f"Linux {machine['kernel']}"
    memory = f"{machine['memory_bytes'] / 2**30:.0f} GiB"
    software = f"Python {machine['python']}, torch {machine['torch']}, {machine['threads']} threads"
    peers = "".join(f", {name} {version}" for name, version in machine["peers"].items())
    places = f"checkpoints on {machine['target_file_system']}, memory on {machine['memory_file_system']}"
    text = f"{machine['date'][:10]}: {cpu}, {memory}, {kernel}, {places}, {software}{peers}. `make bench"
    text += f' ARGS="{settings["command"]}"`' if settings["command"] else "`"
    states = (
        f"{size} in {found['calibration']['tensors']} tensors, a step of "
        f"{found['calibration']['step'] * 1e3:,.0f} ms, a copy of {_floor(found['summary'])}"
        for size, found in document["sizes"].items()
    )
    return f"{text}: {'; '.join(states)}." if document["sizes"] else f"{text}."


def _floor(summary: dict[str, Any]) -> str:
    floors = sorted(s["floor"] for s in summary["saves"].values())
    return f"{_ms(floors[0])} to {_ms(floors[-1])} ms" if floors else "unmeasured length"


def console_table(console: Console, table: Table) -> None:
    found = RichTable(title=table.title, title_justify="left")
    for index, column in enumerate(table.columns):
        text = table.name == "skipped" or table.name.startswith("reach") or not index
        found.add_column(column, justify="left" if text else "right")
    for row in table.rows:
        found.add_row(*row)
    console.print(found)


def console_tables(console: Console, document: dict[str, Any], made: list[Table]) -> None:
    for table in made:
        console_table(console, table)
    console.print(conditions(document), markup=False)
    if document["machine"]["target_file_system"] == "tmpfs":
        console.print("[bold]The target is memory, not a disk: the figures for durability mean nothing.[/]")


def markdown(table: Table) -> str:
    lines = [table.columns, ["---"] * len(table.columns), *table.rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in lines)


def _image(plot: Path, page: Path, title: str) -> str:
    return f"![{title}]({plot.relative_to(page.parent).as_posix()})"


def rewrite(page: Path, document: dict[str, Any], made: list[Table], plots: list[Path]) -> list[str]:
    """Put each table, and its plot, between the page's markers ``<!-- NAME -->`` and ``<!-- end -->``.

    Returns the names of those it has no place for. Where this run has nothing to say, what stands there stays.
    """
    images = {path.stem: path for path in plots if path.suffix == ".svg"}
    blocks = {"conditions": conditions(document)}
    for table in made:
        blocks[table.name] = markdown(table)
        stem = table.name.replace(" ", "-", 1).replace(" ", "")
        if stem in images:
            blocks[table.name] += "\n\n" + _image(images[stem], page, table.title)
    if "growth" in images:
        blocks["growth"] = _image(images["growth"], page, "Cost of a save as the work grows")
    return put_blocks(page, blocks)


def put_blocks(page: Path, blocks: dict[str, str]) -> list[str]:
    """Put each block between the page's markers of its name. Returns the names of those it has no place for."""
    text, missing = page.read_text(), []
    for name, block in blocks.items():
        marked = re.compile(rf"(<!-- {re.escape(name)} -->\n).*?(<!-- end -->)", re.DOTALL)
        text, found = marked.subn(lambda match, block=block: f"{match[1]}\n{block}\n\n{match[2]}", text)
        if not found:
            missing.append(name)
    page.write_text(text)
    return missing
