"""Defines the commands ``pin``, ``unpin`` and ``prune``, which decide what stays on storage."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import click

from rekindle.cli.terminal import ANSWERS_WITHIN, JSON_OPTION, MEMORY_OPTION, ROOT_ARGUMENT, print_json, waiting_for
from rekindle.common.timeouts import with_timeout
from rekindle.errors import NotFoundError
from rekindle.format.names import Root
from rekindle.memory.job_dir import JobDir, memory_base
from rekindle.storage.listing import job_info
from rekindle.storage.open import open_store
from rekindle.storage.pins import pin_step, unpin_step
from rekindle.storage.roots import describe_root
from rekindle.storage.store import Store

__all__ = ["pin_command", "prune_command", "unpin_command"]

_REMOVING = 3600.0
"""Seconds that storage gets to remove checkpoints, of which there may be many and large ones."""
_AT_LEAST_1 = click.IntRange(min=1)
_STEP = click.argument("step", type=click.IntRange(min=0))
_DEFAULT = "the newest two and some of all ages stay, eight at most"


@click.command("pin", short_help="Keep a step on storage, whatever is pruned.")
@ROOT_ARGUMENT
@_STEP
@JSON_OPTION
def pin_command(root: Root, step: int, as_json: bool) -> None:
    """Keep STEP of ROOT on storage, whatever is pruned, until it is unpinned."""
    _on_storage(root, lambda: pin_step(open_store(root), step))
    _show_pin(step, as_json, pinned=True)


@click.command("unpin", short_help="Let retention decide on a step again.")
@ROOT_ARGUMENT
@_STEP
@JSON_OPTION
def unpin_command(root: Root, step: int, as_json: bool) -> None:
    """Let the job, or 'rekindle prune', remove STEP of ROOT again."""
    _on_storage(root, lambda: unpin_step(open_store(root), step))
    _show_pin(step, as_json, pinned=False)


def _show_pin(step: int, as_json: bool, *, pinned: bool) -> None:
    if as_json:
        print_json({"step": step, "pinned": pinned})
    else:
        click.echo(f"step {step} is {'pinned' if pinned else 'not pinned'}")


@click.command("prune", short_help="Remove surplus checkpoints from storage.")
@ROOT_ARGUMENT
@click.option("--keep", type=_AT_LEAST_1, help="Number of newest checkpoints that stay.")
@click.option("--keep-every", type=_AT_LEAST_1, help="Steps that are a multiple of this stay.")
@click.option("--no-best", is_flag=True, help="Let go of the best checkpoint by its metric, too.")
@click.option("--dry-run", is_flag=True, help="Only list the steps that would be removed.")
@JSON_OPTION
@MEMORY_OPTION
def prune_command(
    root: Root,
    keep: int | None,
    keep_every: int | None,
    no_best: bool,
    dry_run: bool,
    as_json: bool,
    memory: Path | None,
) -> None:
    """Remove checkpoints of ROOT from storage that are neither pinned nor to be kept.

    The best one, by the metric of the job's keep_best, stays besides, unless --no-best is given.

    With neither --keep nor --keep-every the job's own settings decide, by which it prunes itself after each checkpoint
    that reaches storage. This node's memory has them from the job's start until close() or 'rekindle stop'. Otherwise
    the newest two stay, and some of all ages: eight at most. A line on stderr tells which.
    """
    store = open_store(root)
    _on_storage(root, lambda: _refuse_empty(store))
    if keep is None and keep_every is None:
        keep, keep_every = _settings_of_job(root, memory)
    if dry_run:
        with waiting_for(root):
            surplus = with_timeout(ANSWERS_WITHIN, root, lambda: store.surplus(keep, keep_every, keep_best=not no_best))
        gone = [entry.stamp.step for entry in surplus]
    else:
        with waiting_for(root):
            gone = with_timeout(_REMOVING, root, lambda: store.prune(keep, keep_every, keep_best=not no_best))
    stays = [entry.stamp.step for entry in with_timeout(ANSWERS_WITHIN, root, store.published)]
    left = [step for step in stays if step not in gone] if dry_run else stays
    if as_json:
        print_json({"removed": gone, "left": left})
    elif gone:
        click.echo(f"{'would remove' if dry_run else 'removed'}: {_listed(gone)}; left: {_listed(left)}")
    else:
        click.echo(f"nothing to remove; left: {_listed(left)}")


def _settings_of_job(root: Root, memory: Path | None) -> tuple[int | None, int | None]:
    """Returns the job's ``keep`` and ``keep_every``, and prints what decides; None twice where they aren't known."""
    job = JobDir.of(root, memory_base(memory))
    job.check()  # a directory that somebody else made must not tell what is removed
    info = job_info(job)
    if info is None:
        click.echo(
            f"This node's memory has no settings of a job at {root}, so the default decides: {_DEFAULT}. --keep and "
            "--keep-every choose otherwise",
            err=True,
        )
        return None, None
    given = [f"{name}={value}" for name, value in (("keep", info.keep), ("keep_every", info.keep_every)) if value]
    what = " and ".join(given) or f"the default, by which {_DEFAULT}"
    click.echo(f"The job's own settings decide, as memory on this node has them: {what}", err=True)
    return info.keep, info.keep_every


def _refuse_empty(store: Store) -> None:
    if not store.published():
        raise NotFoundError(f"{store.root}: no checkpoint on storage")


def _on_storage(root: Root, work: Callable[[], object]) -> None:
    """Does ``work`` in bounded time. Where there is no checkpoint, the error describes what is at ``root`` instead."""
    try:
        with waiting_for(root):
            with_timeout(ANSWERS_WITHIN, root, work)
    except (NotFoundError, NotADirectoryError) as error:
        text = str(error) if isinstance(error, NotFoundError) else f"{root}: no checkpoint on storage"
        what = with_timeout(ANSWERS_WITHIN, root, lambda: describe_root(root))
        raise NotFoundError(f"{text}: {what}" if what else text) from error


def _listed(steps: list[int]) -> str:
    return ", ".join(map(str, steps))
