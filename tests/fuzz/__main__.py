"""Bad input for every parser, guided by coverage: ``python -m tests.fuzz --seconds 180 [--target T] [--docs]``.

Each target runs under atheris in a process of its own. What it finds is made small and kept in tests/fuzz/corpus/, from
where the tests replay it. Needs ``pip install -e '.[fuzz]'``.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import click

from tests.fuzz.targets import TARGETS
from tests.pages import put

_HERE = Path(__file__).parent
_DOCS = Path(__file__).parents[2] / "docs" / "reliability.md"
_STATUS = re.compile(rb"#(\d+)\s+\w+.*?cov: (\d+) ft: (\d+)")
_TELL = 15.0
"""Seconds between two words on how far a target is."""
_DONE = re.compile(rb"stat::number_of_executed_units: (\d+)")


@dataclass
class Seen:
    """What came of one target."""

    name: str
    runs: int = 0
    features: int = 0
    seconds: float = 0.0
    findings: list[str] = field(default_factory=list)


def play(name: str, seconds: int, kept: Path) -> Seen:
    """One target for so long. What ends its process is a finding, after which it goes on."""
    seen = Seen(name)
    place = Path(tempfile.mkdtemp(prefix=f"rekindle-fuzz-{name}-"))
    kept.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    try:
        while (left := int(seconds - seen.seconds)) > 0:
            _round(seen, left, kept, place)
            seen.seconds = time.monotonic() - began
    finally:
        _keep(name, place)
        shutil.rmtree(place, ignore_errors=True)
    return seen


def _round(seen: Seen, seconds: int, kept: Path, place: Path) -> None:
    command = [sys.executable, "-m", "tests.fuzz.worker", seen.name, str(seconds), str(kept), str(place)]
    done, told = 0, time.monotonic()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True) as process:
        assert process.stdout is not None
        tail: list[bytes] = []
        for line in process.stdout:
            tail = [*tail[-30:], line]
            if line.startswith(b"FOUND "):
                seen.findings.append(line[6:].decode().strip())
                click.echo(f"{seen.name}: {seen.findings[-1]}")
            elif match := _STATUS.search(line):
                done, seen.features = int(match[1]), max(seen.features, int(match[3]))
                if time.monotonic() > told + _TELL:
                    told = time.monotonic()
                    click.echo(f"{seen.name}: {seen.runs + done:,} runs, {seen.features:,} features")
            elif match := _DONE.search(line):
                done = int(match[1])
    for parent in ("/dev/shm", tempfile.gettempdir()):  # libFuzzer ends a process without a word to Python
        for left in Path(parent).glob(f"rekindle-fuzz-{process.pid}-*"):
            shutil.rmtree(left, ignore_errors=True)
    seen.runs += done
    if process.returncode:
        seen.findings.append(f"the process ended with {process.returncode}")
        click.echo(f"{seen.name}: {seen.findings[-1]}\n{b''.join(tail).decode(errors='replace')}")
        if not done:
            raise click.ClickException(f"{seen.name} does not run")


def _keep(name: str, place: Path) -> None:
    """Findings, as cases, beside those of before; an input that ended its process, as it is."""
    corpus = _HERE / "corpus" / name
    for path in sorted(place.iterdir()):
        corpus.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".json":
            case = json.loads(path.read_bytes())
            slug = re.sub(r"[^a-z0-9]+", "-", case["finds"].lower()).strip("-")[:60]
            number = 1 + len(list(corpus.glob(f"{slug}-*.json")))
            (corpus / f"{slug}-{number}.json").write_text(json.dumps(case, indent=1) + "\n")
        else:
            shutil.copy(path, corpus)


def _into_docs(all_seen: list[Seen]) -> None:
    rows = ["| target | what runs | runs | features | minutes | findings |", "|---|---|---|---|---|---|"]
    for seen in all_seen:
        cells = (f"{seen.runs:,}", f"{seen.features:,}", f"{seen.seconds / 60:.1f}", str(len(seen.findings)))
        rows.append(f"| {seen.name} | {TARGETS[seen.name].does} | {' | '.join(cells)} |")
    total = sum(seen.runs for seen in all_seen)
    put(_DOCS, "fuzz", "\n".join([f"{total:,} inputs:", "", *rows]))


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--seconds", default=60, show_default=True, help="For each target.")
@click.option(
    "--target", "names", multiple=True, type=click.Choice(list(TARGETS)), help="Only this one; may be given again."
)
@click.option(
    "--keep", type=click.Path(path_type=Path), help="Directory of inputs to begin with, and to go on with later."
)
@click.option("--jobs", default=1, show_default=True, help="Targets at a time.")
@click.option("--docs", is_flag=True, help="Put what was seen into docs/reliability.md.")
def main(seconds: int, names: tuple[str, ...], keep: Path | None, jobs: int, docs: bool) -> None:
    from concurrent.futures import ThreadPoolExecutor

    os.environ.setdefault("OMP_NUM_THREADS", "1")
    inputs = keep or Path(tempfile.mkdtemp(prefix="rekindle-fuzz-inputs-"))
    try:
        with ThreadPoolExecutor(jobs) as pool:
            all_seen = list(pool.map(lambda name: play(name, seconds, inputs / name), names or TARGETS))
    finally:
        if keep is None:
            shutil.rmtree(inputs, ignore_errors=True)
    click.echo()
    for seen in all_seen:
        click.echo(f"{seen.name:12} {seen.runs:12,} runs {seen.features:7,} features {len(seen.findings):3} findings")
    if docs:
        _into_docs(all_seen)
    if any(seen.findings for seen in all_seen):
        raise click.ClickException("there are findings: see tests/fuzz/corpus")


if __name__ == "__main__":
    main()
