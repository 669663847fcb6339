"""Defines the commands ``export`` and ``import``."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.filesize import decimal
from rich.markup import escape
from rich.progress import Progress as Bar

from rekindle.cli.terminal import (
    ANSWERS_WITHIN,
    JSON_OPTION,
    MEMORY_OPTION,
    ROOT_ARGUMENT,
    complete_directory,
    escaped,
    parse_root,
    print_json,
    progress_bar,
)
from rekindle.common.timeouts import with_timeout
from rekindle.errors import CorruptError, NotFoundError
from rekindle.format.metric import best_of
from rekindle.format.names import MAX_STEP, Root
from rekindle.memory.job_dir import JobDir, memory_base
from rekindle.storage.catalog import STORAGE, StoredCopy
from rekindle.storage.listing import list_copies
from rekindle.storage.open import open_store
from rekindle.storage.roots import refuse_inside
from rekindle.storage.throttle import parse_size
from rekindle.transfer.progress import Progress

if TYPE_CHECKING:
    from rekindle.transfer.exporting import Form

__all__ = ["export_command", "import_command"]

_BEST = "best"
"""Names the best step by the job's metric."""
_SHARD = 5_000_000_000
"""Bytes of tensors in a file: the default of Hugging Face."""
_TRIES = 10
"""Attempts at an export from the memory of a job that trains, which may recycle the snapshot meanwhile."""


def _amount(_ctx: click.Context, _param: click.Parameter, value: str | None) -> int | None:
    if value is None:
        return None
    nbytes = parse_size(value)
    if not 1 <= nbytes < 1 << 63:
        raise click.BadParameter(f"{value!r} is not a size: give bytes, or a text like '5GB' or '500MiB'")
    return int(nbytes)


def _places(ctx: click.Context, param: click.Parameter, value: tuple[str, ...]) -> tuple[Root, int | str | None, Path]:
    given, *step, out = value if len(value) in (2, 3) else ("", "", "")
    root = parse_root(ctx, param, given or None)
    if root is None:
        raise click.BadParameter("give ROOT OUT, or ROOT STEP OUT")
    if not step and (out.isdecimal() or out == _BEST):
        raise click.BadParameter(f"is {out} a step? Then OUT is missing; as the name of the export, write ./{out}")
    if step == [_BEST]:
        return root, _BEST, Path(out).absolute()
    if step and not (step[0].isdecimal() and len(step[0]) <= len(str(MAX_STEP))):
        raise click.BadParameter(f"{step[0]!r} is not a step")
    return root, int(step[0]) if step else None, Path(out).absolute()


@click.command("export", short_help="Write a checkpoint for other programs.")
@click.argument("places", nargs=-1, metavar="ROOT [STEP] OUT", callback=_places, shell_complete=complete_directory)
@click.option(
    "--format",
    "form",
    type=click.Choice(["safetensors", "torch", "dcp"]),
    help="Needed, unless --weights-only is given.",
)
@click.option("--weights-only", is_flag=True, help="Only the model, as a folder for Hugging Face's from_pretrained.")
@click.option(
    "--config",
    metavar="DIR",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Folder of the model that was trained: its config.json, tokenizer and the like are copied.",
)
@click.option("--only", metavar="ENTRY", help="Only this entry of the state, its tensors by their own names.")
@click.option(
    "--max-shard-size", metavar="SIZE", callback=_amount, help="Bytes of tensors in a safetensors file; 5GB if unset."
)
@JSON_OPTION
@MEMORY_OPTION
def export_command(
    places: tuple[Root, int | str | None, Path],
    form: Form | None,
    weights_only: bool,
    config: Path | None,
    only: str | None,
    max_shard_size: int | None,
    as_json: bool,
    memory: Path | None,
) -> None:
    """Write a checkpoint of ROOT, of STEP or the newest complete one, to OUT for other programs.

    STEP may be "best": the best one by the metric of the job's keep_best.

    \b
    safetensors  a directory in Hugging Face's layout
    torch        one file for torch.load(weights_only=True)
    dcp          a directory for torch.distributed.checkpoint
    """
    form = _form(form, weights_only=weights_only, config=config)
    if max_shard_size is not None and form != "safetensors":
        raise click.UsageError("--max-shard-size is for --format safetensors")
    root, step, out = places
    from rekindle.transfer.exporting import export  # noqa: PLC0415  the other commands need no torch

    with progress_bar(hidden=as_json) as bar:
        for left in reversed(range(_TRIES)):
            progress = _BarProgress(bar, f"listing {root}")
            copy = with_timeout(ANSWERS_WITHIN, root, lambda: _copy(root, step, memory_base(memory)))
            progress.rename(f"exporting step {copy.step}")
            try:
                limit = max_shard_size or _SHARD
                done = export(copy, out, form, only, limit, progress, weights_only=weights_only, config=config)
                break
            except NotFoundError:
                if copy.place == STORAGE or not left:
                    raise
                progress.drop()
    if as_json:
        print_json(done.to_json())
        return
    files = f"{len(done.files)} files" if len(done.files) > 1 else "one file"
    size = decimal(done.nbytes)
    click.echo(f"step {done.step} from {done.place}: {done.tensors} tensors, {size}, {files}: {done.path}")
    if weights_only and form == "safetensors" and config is None:
        click.echo("from_pretrained needs a config.json beside it: --config DIR copies it from a folder", err=True)


def _form(form: Form | None, *, weights_only: bool, config: Path | None) -> Form:
    """Returns the format to write. Raises UsageError for options that make no sense together."""
    if form is None and not weights_only:
        raise click.UsageError("Missing option '--format'; or give --weights-only")
    form = form or "safetensors"
    if weights_only and form == "dcp":
        raise click.UsageError("--weights-only is for --format safetensors and torch; --only MODEL is for all")
    if config is not None and not (weights_only and form == "safetensors"):
        raise click.UsageError("--config is for --weights-only in --format safetensors")
    return form


def _best(root: Root, base: Path) -> int:
    """Returns the best step by its metric."""
    listed = [entry.copy for entry in list_copies(root, base) if entry.condition == "complete"]
    best = best_of(listed)
    if best is None:
        raise NotFoundError(f"{root}: no checkpoint has a metric, by which one could be the best")
    return best.step


def _copy(root: Root, step: int | str | None, base: Path) -> StoredCopy:
    """Chooses the copy to export: the newest complete one. Of a given step a superseded one will do, too."""
    step = _best(root, base) if isinstance(step, str) else step
    listed = list_copies(root, base, step)
    usable = [e for e in listed if e.condition == "complete" or (step is not None and e.condition == "abandoned")]
    whole = [e for e in usable if len(e.copy.ranks) == e.copy.world]
    if not whole:
        conditions = ", ".join(sorted({e.condition if e not in usable else "without all ranks" for e in listed}))
        wanted = "checkpoint" if step is None else f"checkpoint of step {step}"
        error = CorruptError if all(e.condition == "damaged" for e in listed) else NotFoundError
        raise error(f"{root}: has no whole {wanted} that this node can read; what there is is {conditions}")
    # Storage first: a copy in memory is pinned while it is read, and the job's next saves lack its space.
    best = max(whole, key=lambda e: (e.condition == "complete", *e.copy.checkpoint, e.copy.place == STORAGE))
    return best.copy


@click.command("import", short_help="Make a checkpoint of what other programs wrote.")
@click.argument("source", type=click.Path(path_type=Path))
@ROOT_ARGUMENT
@click.argument("step", type=click.IntRange(0, MAX_STEP))
@click.option("--as", "entry", metavar="ENTRY", help="All of it becomes this entry of the state.")
@click.option("--allow-pickle", is_flag=True, help="Let SOURCE run code: DCP is made of pickles.")
@JSON_OPTION
@MEMORY_OPTION
def import_command(
    source: Path, root: Root, step: int, entry: str | None, allow_pickle: bool, as_json: bool, memory: Path | None
) -> None:
    """Make SOURCE the checkpoint of STEP of ROOT.

    SOURCE is what 'rekindle export' makes, or others have made: a safetensors file, a directory of such, a file of
    torch.save, or a directory of torch.distributed.checkpoint. Of nested dictionaries each becomes an entry of the
    state; what is flat becomes its entry "model", if --as doesn't say otherwise.
    """
    refuse_inside(root)
    with suppress(NotADirectoryError):  # there is none yet, or the import tells why there can't be
        with_timeout(ANSWERS_WITHIN, root, open_store(root).published)  # nobody can tell how long the writing may take
    from rekindle.transfer.importing import import_checkpoint  # noqa: PLC0415

    job = JobDir.of(root, memory_base(memory))
    with progress_bar(hidden=as_json) as bar:
        done = import_checkpoint(
            source, job, root, step, entry, _BarProgress(bar, f"importing step {step}"), allow_pickle=allow_pickle
        )
    if as_json:
        print_json(done.to_json())
        return
    entries = ", ".join(done.entries)
    click.echo(f"step {done.step} of {done.root}: {done.tensors} tensors, {decimal(done.nbytes)}, as {entries}")


class _BarProgress(Progress):
    """Shows the progress of an export or import on a bar."""

    def __init__(self, bar: Bar, description: str) -> None:
        self._bar, self._task = bar, bar.add_task(escape(escaped(description).plain), total=None)

    def rename(self, description: str) -> None:
        self._bar.update(self._task, description=description)

    def begin(self, total: int) -> None:
        self._bar.update(self._task, total=total)

    def advance(self, nbytes: int) -> None:
        self._bar.advance(self._task, nbytes)

    def drop(self) -> None:
        """Removes the bar: another attempt begins with one of its own."""
        self._bar.remove_task(self._task)
