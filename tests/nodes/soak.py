"""Three nodes under random faults, for as long as you like: ``python -m tests.nodes.soak --minutes 30``.

Jobs of some hundred steps train one after the other, each of another kind, and chance lets one fault after the other
befall them. After each fault the job must go on from what was promised. Every step that any rank has made must come
out bit for bit as in a run without faults, and what reaches storage must be sound.

The same seed gives the same faults in the same order. For root, on Linux.
"""

from __future__ import annotations

import itertools
import random
import secrets
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from rekindle.storage.catalog import find_copies
from rekindle.storage.posix import PosixStore
from rekindle.storage.verify import verify
from tests.nodes.cases import Unbroken
from tests.nodes.harms import HARMS, Harm
from tests.nodes.job import Job
from tests.nodes.lab import Lab, why_not
from tests.nodes.train import Task
from tests.pages import put

_DOCS = Path(__file__).parents[2] / "docs" / "nodes.md"
_KINDS = ("fsdp2", "ddp", "zero1")
_HOSTS = 3
_STEPS, _REST = 300, 130
"""Steps of a job, and those at its end in which nothing befalls it."""
_PAUSE = 0.1
_HEADS = ("fault", "times", "most steps lost", "longest until it went on, s")


@dataclass
class Seen:
    """What has been seen of one harm."""

    times: int = 0
    lost: int = 0
    seconds: float = 0.0


@dataclass
class Soak:
    """Lets jobs train in ``place``. ``say`` is given a line for people now and then."""

    place: Path
    dice: random.Random
    names: list[str]
    say: Callable[[str], object]
    seen: dict[str, Seen] = field(default_factory=dict)
    losses: list[str] = field(default_factory=list)
    """All that should not have been."""
    jobs: int = 0
    steps: int = 0
    """Steps of all ranks together, again ones included."""

    def __post_init__(self) -> None:
        self._unbroken = Unbroken(self.place / "unbroken")

    def run(self, seconds: float) -> None:
        """Until the time is over, or something is lost."""
        until = time.monotonic() + seconds
        for kind in itertools.cycle(_KINDS):
            if self.losses or time.monotonic() >= until:
                return
            directory = self.place / f"job-{self.jobs}"
            directory.mkdir()
            self.jobs += 1
            try:
                self._train(kind, directory, until)
            except AssertionError as error:
                self.losses.append(f"{kind}: {error}")
            if not self.losses:
                shutil.rmtree(directory)

    def _train(self, kind: str, directory: Path, until: float) -> None:
        with Lab(directory) as lab:
            for _ in range(_HOSTS):
                lab.add()
            guard = {"watchdog": "fast"}
            task = Task(str(lab.mount / "run"), str(directory), kind, _HOSTS, _STEPS, _PAUSE, guard=guard)
            with Job(lab, task, nodes=_HOSTS, starts=_STEPS) as job:
                start = 0
                while self._completed(job) < _STEPS - _REST and time.monotonic() < until and not self.losses:
                    start = self._strike(job, kind, start)
                job.wait_for_end()
            self._compare(job, kind)
            self._look_at_storage(lab.storage / "run")

    def _completed(self, job: Job) -> int:
        """The newest step that a rank has made."""
        return max((row["step"] for row in job.rows("step")), default=0)

    # -- one fault ------------------------------------------------------------------------------------------------

    def _strike(self, job: Job, kind: str, start: int) -> int:
        """Lets a fault befall a job that is in this start. Returns the start that it has come to by then.

        The fault before is over: newer steps are node-safe. An agent that is away costs more (docs/nodes.md), which
        harms of their own bring about.
        """
        job.wait_for_safe(beyond=self._completed(job), start=start)
        job.wait_for_step(self._completed(job) + self.dice.randint(0, 15))
        name, newest = self.dice.choice(self.names), self._completed(job)
        self.say(f"{kind}, step {newest}: {name}")
        seen, began = self.seen.setdefault(name, Seen()), time.monotonic()
        seen.times += 1
        HARMS[name].strike(job, self.dice)
        job.wait_for_step(self._completed(job) + 3, start + HARMS[name].restarts)
        seen.seconds = max(seen.seconds, time.monotonic() - began)
        seen.lost = max(seen.lost, self._judge(job, kind, name, start))
        return max(row["start"] for row in job.rows("step"))

    def _judge(self, job: Job, kind: str, name: str, start: int) -> int:
        """Returns the steps that a fault has cost."""
        harm = HARMS[name]
        again = [row["step"] for row in job.rows("restored") if row["start"] > start]
        if not again:
            return 0
        if not harm.restarts:
            self.losses.append(f"{kind}: {name}: the job was restarted")
        done, promise = _promise(job, kind, harm, start)
        if min(again) < promise:
            self.losses.append(f"{kind}: {name}: went on from step {min(again)}, and {promise} was promised")
        lost = max(0, done - min(again))
        if lost:
            self.say(f"{kind}, step {done}: {lost} steps lost, {done - promise} were not safe")
        return lost

    # -- one job --------------------------------------------------------------------------------------------------

    def _compare(self, job: Job, kind: str) -> None:
        rows, digests = job.rows("step"), self._unbroken.digests(kind, _HOSTS, _STEPS)
        self.steps += len(rows)
        for row in rows:
            if digests[row["rank"], row["step"]] != row["digest"]:
                self.losses.append(f"{kind}: rank {row['rank']}: step {row['step']} differs from the unbroken run")
                return

    def _look_at_storage(self, root: Path) -> None:
        copies = find_copies(None, PosixStore(root))
        if max((copy.step for copy in copies), default=0) != _STEPS:
            self.losses.append(f"storage has steps {[copy.step for copy in copies]}, and {_STEPS} is missing")
        for copy in copies:
            self.losses += [f"step {copy.step} on storage: {problem}" for problem in verify(copy, lambda nbytes: None)]


def _promise(job: Job, kind: str, harm: Harm, start: int) -> tuple[int, int]:
    """The newest step that all ranks completed in a start, and the one that the next must go on from at least."""
    made = [
        [row["step"] for row in job.rows("step") if (row["start"], row["rank"]) == (start, rank)]
        for rank in range(_HOSTS)
    ]
    done = min(map(max, made))
    copied = harm.lost_node and (kind != "ddp" or harm.without_agents)
    return done, job.safe_steps(start)[-1] if copied else done - 1


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--minutes", default=5.0, show_default=True, help="How long. The job in hand trains to its end.")
@click.option("--seed", type=int, help="Faults of an earlier run again.")
@click.option("--only", type=click.Choice(sorted(HARMS)), multiple=True, help="Only such faults. May be repeated.")
@click.option("--docs", is_flag=True, help="Put what was seen into docs/nodes.md.")
def main(minutes: float, seed: int | None, only: tuple[str, ...], docs: bool) -> None:
    if reason := why_not():
        raise click.ClickException(reason)
    seed = secrets.randbelow(1 << 32) if seed is None else seed
    place, began = Path(tempfile.mkdtemp(prefix="rekindle-nodes-soak-")), time.monotonic()
    click.echo(f"seed {seed}, files in {place}", err=True)
    soak = Soak(
        place, random.Random(seed), list(only) or list(HARMS), lambda line: click.echo(_clock(began, line), err=True)
    )
    soak.run(60 * minutes)
    figures = _figures(soak, seed, (time.monotonic() - began) / 60)
    rows = [(name, str(seen.times), str(seen.lost), f"{seen.seconds:.1f}") for name, seen in sorted(soak.seen.items())]
    table = Table(*_HEADS)
    for row in rows:
        table.add_row(*row)
    Console(width=None if sys.stdout.isatty() else 120).print(table, *figures, sep="\n")
    for loss in soak.losses:
        click.echo(f"LOST: {loss}", err=True)
    if docs:
        lines = [f"- {line}" for line in figures] + ["", "| " + " | ".join(_HEADS) + " |"]
        lines += ["| " + " | ".join("---" for _ in _HEADS) + " |", *("| " + " | ".join(row) + " |" for row in rows)]
        put(_DOCS, "soak", "\n".join(lines))
    if soak.losses:
        raise click.ClickException(f"--seed {seed} lets these faults befall again; logs are in {place}")
    shutil.rmtree(place, ignore_errors=True)


def _clock(began: float, line: str) -> str:
    minutes, seconds = divmod(int(time.monotonic() - began), 60)
    return f"{minutes:3d}:{seconds:02d} {line}"


def _figures(soak: Soak, seed: int, minutes: float) -> list[str]:
    return [
        f"{minutes:.0f} minutes, seed {seed}, {soak.jobs} jobs on {_HOSTS} nodes, {soak.steps:,} steps of a rank",
        f"{sum(seen.times for seen in soak.seen.values())} faults of {len(soak.seen)} kinds",
        f"{len(soak.losses)} losses",
    ]


if __name__ == "__main__":
    main()
