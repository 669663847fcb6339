"""Defines the command ``status``."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
from rich.console import Console, Group, RenderableType
from rich.filesize import decimal
from rich.live import Live
from rich.padding import Padding
from rich.table import Table

from rekindle.cli.board import Board
from rekindle.cli.files import NO_FILES, facts_of_files, files_status
from rekindle.cli.operations import ended_status, job_status
from rekindle.cli.terminal import (
    ANSWERS_WITHIN,
    JSON_OPTION,
    MEMORY_OPTION,
    complete_directory,
    escaped,
    local_time,
    make_facts_table,
    make_table,
    parse_root,
    print_json,
    show,
    waiting_for,
)
from rekindle.common.timeouts import with_timeout
from rekindle.errors import RekindleError
from rekindle.format.names import Root
from rekindle.memory.job_dir import JobDir, memory_base
from rekindle.memory.nodes import ranges
from rekindle.storage.listing import jobs_in_memory

__all__ = ["ended_job", "status_command"]

_WATCH_EVERY = 0.5
_INDENT = (0, 0, 0, 2)
_FILES = "files of rekindle.save"
"""Heading of what is no job."""


@click.command("status", short_help="Show jobs: who is alive, what is in memory, what is on storage.")
@click.argument("root", required=False, callback=parse_root, shell_complete=complete_directory)
@click.option("--watch", is_flag=True, help="Go on showing it, with speeds, until interrupted.")
@click.option("--files", is_flag=True, help="Show the files of rekindle.save, and no jobs.")
@JSON_OPTION
@MEMORY_OPTION
def status_command(root: Root | None, watch: bool, files: bool, as_json: bool, memory: Path | None) -> None:
    """Show this node's jobs, or that of ROOT: who is alive and does what, what is in memory, what is on storage."""
    base = memory_base(memory)
    if watch and as_json:
        raise click.UsageError("give either --watch or --json")
    if files and root is not None:
        raise click.UsageError("give either ROOT or --files")
    if watch:
        _watch(root, base, files=files)
        return
    with waiting_for(root or base):
        found = [] if files else _statuses(root, base)
    held = None if root is not None or (as_json and not files) else files_status(base)
    if as_json:
        print_json(held if files else found)
    else:
        if not found and not files:
            click.echo(f"no jobs have memory on this node, in {base}")
        if held is None and files:
            click.echo(NO_FILES.format(base))
        if found or held is not None:
            show(_view(found, held))
    problems = _problems(found, held)
    if problems:
        raise RekindleError("; ".join(problems))


def ended_job(root: Root, base: Path) -> dict[str, Any]:
    """Returns the status of a job without memory here. Raises TimeoutError where storage doesn't answer."""
    return with_timeout(ANSWERS_WITHIN, root, lambda: ended_status(root, base))


def _statuses(root: Root | None, base: Path) -> list[dict[str, Any]]:
    wanted = (
        jobs_in_memory(base)
        if root is None
        else [job for job in jobs_in_memory(base) if job.path == JobDir.of(root, base).path]
    )
    if root is not None and not wanted:
        return [ended_job(root, base)]
    return [job_status(job) for job in wanted]


def _watch(root: Root | None, base: Path, *, files: bool) -> None:
    board = Board()
    with Live(console=Console(), auto_refresh=False) as live:
        while True:
            found = [] if files else _statuses(root, base)
            held = files_status(base) if root is None else None
            parts: list[RenderableType] = [f"{local_time(time.time())}  {len(found)} job{'s' * (len(found) != 1)}"]
            if found:
                parts += ["", board.table(found)]
            if len(found) == 1 or held is not None:  # more jobs than one would not fit below their table
                parts += ["", _view(found if len(found) == 1 else [], held)]
            live.update(Group(*parts, *map(escaped, _problems(found, held))), refresh=True)
            time.sleep(_WATCH_EVERY)


def _name(one: dict[str, Any]) -> str:
    return str(one["root"] or one["directory"])


def _problems(found: list[dict[str, Any]], held: dict[str, Any] | None) -> list[str]:
    problems = [f"{_name(one)}: {one['problem']}" for one in found if one["problem"]]
    return problems + ([f"{_FILES}: {held['problem']}"] if held is not None and held["problem"] else [])


def _view(found: list[dict[str, Any]], held: dict[str, Any] | None) -> Group:
    """Shows each job, and the files, below its own name: a column for names of any length would leave no room."""

    def lines() -> Iterator[RenderableType]:
        for number, one in enumerate(found):
            if number:
                yield ""
            yield escaped(_name(one))
            yield Padding(make_facts_table(_facts(one)), _INDENT, expand=False)
            if one["nodes"]:
                yield Padding(_nodes_table(one["nodes"]), _INDENT, expand=False)
            if one["ranks"]:
                yield Padding(_ranks_table(one["ranks"]), _INDENT, expand=False)
        if held is not None:
            if found:
                yield ""
            yield escaped(_FILES)
            yield Padding(make_facts_table(facts_of_files(held)), _INDENT, expand=False)

    return Group(*lines())


def _facts(one: dict[str, Any]) -> dict[str, str]:
    drain, fault, durable = one["drain"] or {}, one["fault"], one["durable_step"]
    facts = {
        "trainers": " ".join(f"{rank}:{pid}" for rank, pid in one["trainers"].items()) or "none",
        "agent": str(one["agent"] or "none"),
        "in memory": f"{' '.join(map(str, one['memory_steps'])) or '-'} ({decimal(one['memory_bytes'])})",
        "durable": "-" if durable is None else str(durable),
        **_node_safe(one),
    }
    if drain.get("copying"):
        copying = drain["copying"]
        facts["copying"] = f"{copying['step']}: {100 * copying['done'] // max(copying['total'], 1)} %"
    if drain.get("step") is not None:
        facts["draining"] = f"{drain['step']}: {100 * drain['done'] // max(drain['total'], 1)} %"
    if fault:
        facts["last fault"] = f"{local_time(fault['at'])} {fault['what']}"
    return facts


def _node_safe(one: dict[str, Any]) -> dict[str, str]:
    """Returns the line on the newest step that survives the loss of a node; none of a job on one node."""
    step, lag, before = one["node_safe_step"], one["node_safe_lag"], one["node_safe_before"]
    if step is not None:
        return {"node-safe": f"{step}, {lag} step{'s' * (lag != 1)} behind" if lag else f"{step}, the newest"}
    if not one["nodes"]:
        return {}
    if before is not None:
        return {"node-safe": f"{before}, of a former start, unless a node was lost since"}
    return {"node-safe": "-" if one["peer_every"] is not None else "- (peer_every=None: nodes keep no copies)"}


def _ranks_table(ranks: dict[int, dict[str, Any]]) -> Table:
    several = any(page["node"] for page in ranks.values())
    columns = ["rank", *(["node"] if several else []), "does", "step", "in memory", "for", "longest step"]
    table = make_table(*columns, may_fold=["node", "does"])
    for rank, page in ranks.items():
        longest = f"{page['longest_step']:.2f} s" if page["longest_step"] else "-"
        does = f"{page['does']}: {page['note']}" if page["note"] else page["does"]
        times = f"{page['age']:.2f} s", longest
        node = [page["node"] or "-"] if several else []
        table.add_row(str(rank), *node, does, _step(page["step"]), _step(page["in_memory"]), *times)
    return table


def _nodes_table(nodes: list[dict[str, Any]]) -> Table:
    table = make_table(
        *("node", "ranks", "is", "steps", "in memory", "durable", "last heard"), may_fold=["node", "ranks", "is"]
    )
    for node in nodes:
        steps = sorted({*node["steps"].values()})
        heard = "-" if node["seconds"] is None else f"{node['seconds']:.1f} s ago"
        table.add_row(
            *(node["name"], ranges(node["ranks"]), node["state"]),
            *("-".join(map(str, steps[:1] + steps[1:][-1:])) if steps and steps[0] >= 0 else "-",),
            *(_step(node["newest"]), _step(node["durable"]), heard),
        )
    return table


def _step(step: int | None) -> str:
    return "-" if step is None or step < 0 else str(step)
