"""Training under random faults, for as long as you like: ``make soak MINUTES=30`` or ``python -m tests.soak``.

A job of two ranks trains for real. A nemesis, drawn from a seed, lets one fault after the other befall it; a launcher
like torchrun's starts it again. A model knows what must be there: training is a function of the step alone, so a step
that is trained again must come out bit for bit as it did before, a start must go on from what was promised after such
a fault, and what was once on storage must stay there, sound, until something newer is.

The same seed gives the same faults in the same order.
"""

from __future__ import annotations

import secrets
import shutil
import tempfile
import time
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from tests.faults.harness import end_agent
from tests.pages import put
from tests.soak.nemesis import FAULTS, mounted
from tests.soak.run import Soak

_DOCS = Path(__file__).parents[2] / "docs" / "reliability.md"


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--minutes", default=5.0, show_default=True, help="How long.")
@click.option("--seed", type=int, help="Faults of an earlier run again.")
@click.option("--only", type=click.Choice(sorted(FAULTS)), multiple=True, help="Only such faults. May be repeated.")
@click.option("--keep", is_flag=True, help="Leave logs and traces there for a look.")
@click.option("--docs", is_flag=True, help="Put what was seen into docs/reliability.md.")
def main(minutes: float, seed: int | None, only: tuple[str, ...], keep: bool, docs: bool) -> None:
    seed = secrets.randbelow(1 << 32) if seed is None else seed
    place, console, began = Path(tempfile.mkdtemp(prefix="rekindle-soak-")), Console(stderr=True), time.monotonic()
    console.print(f"seed {seed}, files in {place}")
    with mounted(place) as places:
        kinds = [name for name, fault in FAULTS.items() if places.mounts or not fault.mounts]
        soak = Soak(places, seed, list(only) or kinds, lambda line: console.print(f"{_clock(began)} {line}"))
        try:
            soak.run(60 * minutes)
        finally:
            end_agent(places.spec.job)
    lines = _figures(soak, (time.monotonic() - began) / 60)
    table = Table("fault", "times")
    for name, count in sorted(soak.injected.items()):
        table.add_row(name, str(count))
    Console().print(table, *lines, sep="\n")
    if docs:
        counts = "; ".join(f"{name} {count}" for name, count in sorted(soak.injected.items()))
        put(_DOCS, "soak", "\n".join([*(f"- {line}" for line in lines), "", f"Faults: {counts}."]))
    for loss in soak.model.losses:
        console.print(f"LOST: {loss}", style="red")
    if soak.model.losses:
        raise click.ClickException(f"--seed {seed} lets these faults befall again; logs are in {place}")
    if not keep:
        shutil.rmtree(place, ignore_errors=True)


def _clock(began: float) -> str:
    minutes, seconds = divmod(int(time.monotonic() - began), 60)
    return f"{minutes:3d}:{seconds:02d}"


def _figures(soak: Soak, minutes: float) -> list[str]:
    model = soak.model
    return [
        f"{minutes:.0f} minutes, seed {soak.seed}, {soak.starts} starts, {model.steps:,} steps of a rank",
        f"{sum(soak.injected.values())} faults of {len(soak.injected)} kinds",
        f"{len(model.checkpoints)} checkpoints seen on storage, {model.bytes_verified / 1e9:.1f} GB of them verified",
        f"longest stall {model.stall:.2f} s",
        f"{len(model.losses)} losses",
    ]


if __name__ == "__main__":
    main()
