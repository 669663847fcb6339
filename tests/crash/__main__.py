"""Every state that a power cut may leave: ``python -m tests.crash``.

The default is what the tests look at. ``--full`` looks at all sequences of up to three operations, at each operation
killed at each of its calls and followed by each other one, and at each moment at which two nodes may meet.
"""

from __future__ import annotations

import os
import re
import time
from collections import Counter
from pathlib import Path

import click

from tests.crash.histories import look_at_all
from tests.pages import put

_DOCS = Path(__file__).parents[2] / "docs" / "reliability.md"
_HEADS = ("histories", "points", "reached", "states", "second points", "second states", "bounded")


def _report(how: str, counts: dict[str, Counter[str]], different: int, wrong: int, seconds: float) -> list[str]:
    """Lines of a table, and of a text."""
    rows = ["| | " + " | ".join(_HEADS) + " |", "|---" * (len(_HEADS) + 1) + "|"]
    for kind, count in sorted(counts.items()):
        rows.append(f"| {kind} | " + " | ".join(f"{count[head]:,}" for head in _HEADS) + " |")
    total = sum(counts.values(), Counter[str]())
    rows.append("| all | " + " | ".join(f"{total[head]:,}" for head in _HEADS) + " |")
    text = (
        f"`python -m tests.crash --{how}`: {different:,} different states, {wrong} violations; {seconds / 60:.0f} min."
    )
    return [*rows, "", text]


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--full", "how", flag_value="full", help="All of it.")
@click.option("--quick", "how", flag_value="quick", default=True, help="What the tests look at. The default.")
@click.option("--workers", type=click.IntRange(min=1), default=os.cpu_count() or 1, help="Processes.")
@click.option("--docs", is_flag=True, help="Put the counts into docs/reliability.md.")
def main(how: str, workers: int, docs: bool) -> None:
    """Look at every state of the disk that a power cut may leave."""
    began = time.monotonic()
    counts, different, found = look_at_all(how, workers)
    lines = _report(how, counts, different, len(found), time.monotonic() - began)
    click.echo("\n".join(lines))
    if docs:
        put(_DOCS, "crash", "\n".join(lines))
    shown = {re.sub(r"[0-9]+", "", violation.wrong): violation for violation in found}
    for violation in shown.values():
        click.echo(f"\n{violation}")
    if found:
        raise click.ClickException(f"{len(found)} violations; one of each kind is shown")


if __name__ == "__main__":
    main()
