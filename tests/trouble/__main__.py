"""``python -m tests.trouble``: every call of a save, its drain and its tidying fails in turn. ``--full``: every one."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

import click

from tests.pages import put
from tests.trouble.sweep import KINDS, PLACES, Cell, Outcome, Worker, build

_DOCS = Path(__file__).parents[2] / "docs" / "reliability.md"


def _play(every: int) -> list[tuple[Cell, Outcome]]:
    # Not in /dev/shm alone: storage is to be a disk, where there is one.
    place = Path(tempfile.mkdtemp(prefix="rekindle-trouble-"))
    played: list[tuple[Cell, Outcome]] = []
    library = build(place)
    if library is None:
        raise click.ClickException("this takes Linux and a C compiler: install gcc")
    worker = Worker(place, library)
    try:
        for where in PLACES:
            for kind in KINDS:
                for cell in worker.cells(where, kind, every):
                    outcome = worker.play(cell)
                    played.append((cell, outcome))
                    for wrong in outcome.wrong[:3]:
                        click.echo(f"{cell}: {wrong}")
                    if outcome.wrong == ["the process died"]:
                        worker.close()
                        worker = Worker(place, library)
                click.echo(f"{where}, {kind}: {len(played)} cells so far", err=True)
    finally:
        worker.close()
        shutil.rmtree(place, ignore_errors=True)
    return played


def _table(played: list[tuple[Cell, Outcome]]) -> list[str]:
    cells: Counter[tuple[str, str]] = Counter()
    failed: Counter[tuple[str, str]] = Counter()
    bad: Counter[tuple[str, str]] = Counter()
    errors: dict[tuple[str, str], set[str]] = {}
    for cell, outcome in played:
        key = cell.place, cell.kind
        cells[key] += 1
        failed[key] += outcome.fired
        bad[key] += bool(outcome.wrong)
        errors.setdefault(key, set()).add(str(cell).split()[2])
    lines = [
        "| store | call | how it fails | runs | calls that failed | not as demanded |",
        "|---|---|---|--:|--:|--:|",
    ]
    for key in cells:
        how = ", ".join(sorted(errors[key]))
        lines.append(f"| {key[0]} | {key[1]} | {how} | {cells[key]} | {failed[key]:,} | {bad[key]} |")
    total = f"| all | | | {sum(cells.values()):,} | {sum(failed.values()):,} | {sum(bad.values())} |"
    return [*lines, total]


def _tests(place: Path) -> list[str]:
    """Runs all tests of this folder, the campaigns too: a row for each file."""
    report = place / "report.xml"
    command = [sys.executable, "-m", "pytest", "-q", "-m", "", str(Path(__file__).parent), f"--junitxml={report}"]
    subprocess.run(command, check=False)
    found: dict[str, Counter[str]] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        what = next((child.tag for child in case if child.tag in ("failure", "error", "skipped")), "passed")
        found.setdefault(case.attrib["classname"].rpartition(".")[2], Counter())[what] += 1
    lines = ["| `tests/trouble` | tests | passed | failed | skipped |", "|---|--:|--:|--:|--:|"]
    for name, count in sorted(found.items()):
        bad = count["failure"] + count["error"]
        lines.append(f"| `{name}.py` | {count.total()} | {count['passed']} | {bad} | {count['skipped']} |")
    return lines


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--full", is_flag=True, help="Every call, and then all tests of this folder; else every twentieth call.")
@click.option("--docs", is_flag=True, help="Put the counts into docs/reliability.md.")
def main(full: bool, docs: bool) -> None:
    began = time.monotonic()
    played = _play(1 if full else 20)
    lines = _table(played)
    click.echo("\n".join([*lines, f"{time.monotonic() - began:.0f} s"]))
    if docs:
        put(_DOCS, "trouble", "\n".join(lines))
    if full:
        with tempfile.TemporaryDirectory() as place:
            lines += ["", *_tests(Path(place))]
        if docs:
            put(_DOCS, "trouble", "\n".join(lines))
    bad = [cell for cell, outcome in played if outcome.wrong]
    if bad:
        raise click.ClickException(f"{len(bad)} of {len(played)} runs are not as demanded")


if __name__ == "__main__":
    sys.exit(main())
