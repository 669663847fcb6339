"""Writes the tables of experiments into docs/benchmarks.md: expected figures, and measured ones once there are."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from report import Table, markdown

from on_gpu.experiments import BEYOND_ONE_DEVICE, EXPERIMENTS, RUNS
from on_gpu.results import Figure

__all__ = ["NOT_RUN", "into_docs"]

_DOCS = Path(__file__).resolve().parents[2] / "docs" / "benchmarks.md"
NOT_RUN = "not run yet"
_NO_DEVICE = f"{NOT_RUN.capitalize()}: no device was at hand."


def into_docs(results: Iterable[Path], page: Path = _DOCS) -> None:
    """Put tables with the figures of ``results`` into the page. Of an experiment in two files the last counts.

    Of experiments that no file has the page keeps its figures, and the machines that those may be from.
    """
    text = page.read_text()
    documents = [json.loads(path.read_text()) for path in results]
    found = {outcome["name"]: outcome for document in documents for outcome in document["experiments"]}
    measured = {e.name: _measured(found[e.name]) if e.name in found else _standing(text, e.name) for e in EXPERIMENTS}
    machines = dict.fromkeys(_machine(document["machine"]) for document in documents)
    if any(measured[name] != NOT_RUN for name in measured.keys() - found):
        machines = dict.fromkeys([*_machines(text), *machines])
    beyond = Table(
        "gpu beyond", "Beyond one device", ["what", "why"], [list(pair) for pair in BEYOND_ONE_DEVICE.items()]
    )
    blocks = {table.name: markdown(table) for table in (*(_table(run, measured) for run in RUNS), beyond)}
    blocks["gpu machine"] = "; ".join(machines) + "." if machines else _NO_DEVICE
    for name, block in blocks.items():
        marked = re.compile(rf"(<!-- {name} -->\n).*?(<!-- end -->)", re.DOTALL)
        text, places = marked.subn(lambda match, block=block: f"{match[1]}\n{block}\n\n{match[2]}", text)
        if not places:
            raise ValueError(f"{page} has no place for {name}")
    page.write_text(text)


def _standing(text: str, name: str) -> str:
    """Returns the measured figures that the page has of an experiment."""
    row = re.search(rf"^\| `{name}` \|.* \| (.*) \|$", text, re.MULTILINE)
    return row[1] if row else NOT_RUN


def _machines(text: str) -> list[str]:
    """Returns the machines that the page names."""
    block = re.search(r"<!-- gpu machine -->\n(.*?)<!-- end -->", text, re.DOTALL)
    named = block[1].strip() if block else _NO_DEVICE
    return named.removesuffix(".").split("; ") if named != _NO_DEVICE else []


def _table(run: str, measured: dict[str, str]) -> Table:
    columns = ["experiment", "measures", "expected", "measured"]
    chosen = [e for e in EXPERIMENTS if e.run == run]
    rows = [[f"`{e.name}`", e.title, e.expected, measured[e.name]] for e in chosen]
    return Table(f"gpu {run}", RUNS[run], columns, rows)


def _measured(outcome: dict[str, Any]) -> str:
    figures = [Figure(**figure) for figure in outcome["figures"]]
    shown = [f"{f.what}: {f.shown}{' (**not as expected**)' if f.met is False else ''}" for f in figures]
    if outcome["status"] != "done":
        shown.append(f"**{outcome['status']}**")
    return "<br>".join(shown)


def _machine(machine: dict[str, Any]) -> str:
    names = f"{machine['device']}, {machine['cpu']}, {machine['cores']} cores, Linux {machine['kernel']}"
    return f"{machine['date'][:10]}: {names}, torch {machine['torch']}, memory: {machine['memory_kind']}"
