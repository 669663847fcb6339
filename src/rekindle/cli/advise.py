"""Defines the command ``advise``: how often a job should be saved."""

from __future__ import annotations

from pathlib import Path

import click
from rich.console import Group, RenderableType

from rekindle.cli.advice import Advice, advise
from rekindle.cli.curve import FORMATS, draw
from rekindle.cli.incidents import collect_incidents
from rekindle.cli.terminal import (
    JSON_OPTION,
    MEMORY_OPTION,
    ROOT_ARGUMENT,
    make_facts_table,
    make_table,
    print_json,
    show,
    waiting_for,
)
from rekindle.common.durations import describe_seconds
from rekindle.common.waste import BUDGET
from rekindle.errors import NotFoundError
from rekindle.format.names import Root
from rekindle.memory.history import ASSUMED
from rekindle.memory.job_dir import memory_base

__all__ = ["advise_command"]


@click.command("advise", short_help="Tell how often a job should be saved, and draw what each interval wastes.")
@ROOT_ARGUMENT
@click.option(
    *("--plot", "picture"),
    type=click.Path(path_type=Path, dir_okay=False),
    help="Draw the curves: FILE.png or FILE.svg.",
)
@click.option(
    *("--budget",),
    type=click.FloatRange(0, 1, min_open=True, max_open=True),
    default=BUDGET,
    show_default=True,
    help="Share of training time that snapshots may take, and writes to storage.",
)
@JSON_OPTION
@MEMORY_OPTION
def advise_command(root: Root, picture: Path | None, budget: float, as_json: bool, memory: Path | None) -> None:
    """Tell how often the job of ROOT should be saved, by what saves took from training and by its own faults.

    Waste is the share of time that saves take, and that is trained in vain before a fault. Faults are taken to come at
    a constant rate (Young 1974, Daly 2006), estimated from those recorded and one more, in the time recorded and a day
    more.

    Prices may rest on a single snapshot and a single write. snapshot_every="auto" needs no advice to keep to
    snapshot_budget, by a measure of its own.
    """
    if picture is not None and picture.suffix.lower() not in FORMATS:
        raise click.UsageError(f"--plot {picture}: must end in {' or '.join(FORMATS)}")
    with waiting_for(root):
        records, problems, trouble = collect_incidents(root, memory_base(memory))
    for problem in problems:
        click.echo(f"skipped: {problem}", err=True)
    advice = advise(records, budget)
    if advice is None:
        if trouble is not None:
            raise trouble
        raise NotFoundError(
            f"{root}: what saves take from training is not known: it is measured while the job trains, from its tenth "
            "second on, and kept in memory, and on storage with the record of each fault"
        )
    if picture is not None:
        draw(advice, str(root), picture)
    if as_json:
        print_json(advice.to_json())
    else:
        show(Group(*_view(advice)))
    if trouble is not None:
        raise trouble


def _view(advice: Advice) -> list[RenderableType]:
    table = make_table("", "every", "waste", "better", "waste", "setting")
    for level in advice.levels:
        now = ("-", "-") if level.now is None else (describe_seconds(level.now), _percent(level.waste(level.now)))
        table.add_row(level.name, *now, describe_seconds(level.best), _percent(level.waste(level.best)), level.setting)
    if len(advice.levels) > 1:
        both = "-" if advice.waste_now is None else _percent(advice.waste_now)
        table.add_row("both", "", both, "", _percent(advice.waste_best), "")
    return [table, "", make_facts_table(_facts(advice))]


def _facts(advice: Advice) -> dict[str, str]:
    history, prices = advice.history, advice.prices
    facts = {
        "a step": describe_seconds(prices.step),
        "a snapshot": f"takes {describe_seconds(prices.snapshot)} of training",
    }
    if prices.drain is not None and prices.drain_cost is not None:
        took = describe_seconds(prices.drain)
        facts["a write to storage"] = f"takes {took}, and {describe_seconds(prices.drain_cost)} of training"
    else:
        facts["a write to storage"] = "not measured yet: no advice on it"
    facts["faults"] = f"{history.faults} in {describe_seconds(history.seconds)}"
    for level in advice.levels:
        facts[f"back to {level.name}"] = f"{level.faults}; one every {describe_seconds(level.between)} is expected"
    more = describe_seconds(ASSUMED)
    facts["faults to come"] = f"estimated from those recorded and one more, in the time recorded and {more} more"
    facts['snapshot_every="auto"'] = "keeps to snapshot_budget by a measure of its own: no need to replace it"
    facts["recoveries"] = f"{_percent(advice.outages)} more, whatever the intervals"
    for level in advice.levels:
        if level.best <= 1.05 * level.least:
            facts[f"{level.name} limit"] = f"no interval below {describe_seconds(level.least)}: {level.bound}"
    return facts


def _percent(share: float) -> str:
    return f"{100 * share:.2g} %" if share < 0.995 else "all"
