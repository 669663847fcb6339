"""Defines the command ``rekindle``, adds the commands of the other modules to it, and turns errors into exit codes.

The exit code is 0 only when all is well, otherwise that of the error, as in rekindle.errors.
"""

from __future__ import annotations

import io
import json
import logging
import os
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

import click
from rich.console import Group
from rich.filesize import decimal
from rich.progress import Progress

from rekindle.agent.service import run as run_agent
from rekindle.cli.advise import advise_command
from rekindle.cli.completion import completion_command
from rekindle.cli.drill import FAULTS, drill
from rekindle.cli.files import files_are_stale, flush_command, stop_files
from rekindle.cli.incidents import incidents_command, make_incident_tables
from rekindle.cli.keep import pin_command, prune_command, unpin_command
from rekindle.cli.ls import ls_command
from rekindle.cli.metrics import metrics_command
from rekindle.cli.operations import stop
from rekindle.cli.run import run_command
from rekindle.cli.status import ended_job, status_command
from rekindle.cli.terminal import (
    ANSWERS_WITHIN,
    JSON_OPTION,
    MEMORY_OPTION,
    ROOT_ARGUMENT,
    STEP_ARGUMENT,
    DrainDisplay,
    asks_for_json,
    complete_directory,
    make_table,
    parse_root,
    print_json,
    progress_bar,
    show,
    waiting_for,
)
from rekindle.cli.transfer import export_command, import_command
from rekindle.cli.ui import ui_command
from rekindle.common.os_errors import explain
from rekindle.common.timeouts import with_timeout
from rekindle.errors import CorruptError, NotFoundError, RekindleError, UsageError
from rekindle.format.names import Root
from rekindle.format.receipt import Receipt
from rekindle.memory.compile_dir import CompileDir
from rekindle.memory.job_dir import JobDir, memory_base
from rekindle.storage.catalog import MEMORY, STORAGE
from rekindle.storage.listing import (
    ListedCopy,
    job_in_memory,
    job_info,
    jobs_in_memory,
    list_copies,
    list_kept,
    list_values,
    read_receipts,
)
from rekindle.storage.open import open_store
from rekindle.storage.verdicts import Verdict, note_verdicts
from rekindle.storage.verify import verify

__all__ = ["main"]

_INTERRUPTED = 130
"""Exit code after Ctrl-C: 128 and the signal's number, as in a shell."""
_GONE = "gone: a newer step has taken its place"
"""Verdict on a copy that was removed or replaced while it was read."""


class _Group(click.Group):
    """Turns errors into one line on stderr, or JSON where that was asked for, and into their exit code."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ctx.obj = asks_for_json(args)
        return super().parse_args(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        if isinstance(sys.stdout, io.TextIOWrapper):  # paths and names may have characters that it can't encode
            sys.stdout.reconfigure(errors="backslashreplace")
        try:
            return super().invoke(ctx)
        except RekindleError as error:
            self._fail(ctx, type(error).__name__, str(error), error.exit_code)
        except KeyboardInterrupt:
            self._fail(ctx, KeyboardInterrupt.__name__, "interrupted", _INTERRUPTED)
        except BrokenPipeError:  # the reader, such as head, has seen enough
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            ctx.exit(0)
        except OSError as error:  # such as a snapshot that a live job recycled while it was read
            self._fail(ctx, type(error).__name__, explain(error), RekindleError.exit_code)
        except click.UsageError as error:
            if not ctx.obj:
                raise
            self._fail(ctx, UsageError.__name__, error.format_message(), UsageError.exit_code)

    @staticmethod
    def _fail(ctx: click.Context, kind: str, message: str, exit_code: int) -> NoReturn:
        error = {"type": kind, "message": message, "exit_code": exit_code}
        click.echo(json.dumps({"error": error}) if ctx.obj else f"Error: {message}", err=True)
        ctx.exit(exit_code)


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="rekindle", message="rekindle %(version)s")
def main() -> None:
    """Keep large PyTorch training jobs alive through faults."""


for _command in (pin_command, unpin_command, prune_command, flush_command):
    main.add_command(_command)
main.add_command(advise_command)
main.add_command(completion_command)
main.add_command(ls_command)
main.add_command(export_command)
main.add_command(import_command)
main.add_command(incidents_command)
main.add_command(metrics_command)
main.add_command(run_command)
main.add_command(status_command)
main.add_command(ui_command)


def _copies_of(root: Root, memory: Path | None, step: int | None = None) -> list[ListedCopy]:
    """Lists all that this node can see, and last what it keeps of another node's snapshots."""
    base = memory_base(memory)
    kept = list_kept(root, base, step)
    try:
        with waiting_for(root):
            return with_timeout(ANSWERS_WITHIN, root, lambda: list_copies(root, base, step)) + kept
    except NotFoundError:
        if not kept:
            raise
        return kept


@main.command("inspect", short_help="Show the tensors and values of a checkpoint.")
@ROOT_ARGUMENT
@STEP_ARGUMENT
@JSON_OPTION
@MEMORY_OPTION
def inspect(root: Root, step: int | None, as_json: bool, memory: Path | None) -> None:
    """Show the tensors and values of a checkpoint of ROOT: of STEP, or the newest complete one."""
    listed = _copies_of(root, memory, step)
    entry = next((e for e in listed if e.condition == "complete"), listed[0])
    with waiting_for(root):
        found = with_timeout(ANSWERS_WITHIN, root, lambda: _read(_with_kept(entry, listed)))
    if as_json:
        shards = [
            {
                "rank": receipt.stamp.rank,
                "copy": is_copy,
                "tensors": [chunk.to_json() for chunk in receipt.layout.chunks],
                "values": dict(list_values(receipt)),
            }
            for receipt, is_copy in found
        ]
        print_json({**entry.to_json(), "shards": shards})
        return
    click.echo(f"step {entry.copy.step} from {entry.copy.place}, {entry.condition}: {entry.copy.files}\n")
    tensors = make_table("rank", "tensor", "dtype", "shape", "of which", "bytes")
    values = make_table("rank", "value", "")
    for receipt, is_copy in found:
        rank = f"{receipt.stamp.rank} (copy)" if is_copy else str(receipt.stamp.rank)
        for chunk in receipt.layout.chunks:
            box = "" if chunk.sizes == chunk.global_shape else str(chunk.box)
            row = (rank, chunk.name, chunk.dtype, str(list(chunk.global_shape)), box, f"{chunk.nbytes:,}")
            tensors.add_row(*row)
        for path, value in list_values(receipt):
            text = json.dumps(value)
            values.add_row(rank, path, text if len(text) <= 60 else f"{text[:57]}...")
    show(tensors)
    click.echo()
    show(values)


def _read(entries: list[ListedCopy]) -> list[tuple[Receipt, bool]]:
    """Reads the receipts of a checkpoint. True of those that this node keeps for another one."""
    return [(receipt, each.condition == "copy") for each in entries for receipt in read_receipts(each.copy)]


def _with_kept(entry: ListedCopy, listed: list[ListedCopy]) -> list[ListedCopy]:
    """Returns a copy of a checkpoint and, if it is in memory, what this node keeps of it for another node."""
    kept = (each for each in listed if each.condition == "copy" and each.copy.checkpoint == entry.copy.checkpoint)
    return [entry, *(each for each in kept if each is not entry and entry.copy.place == MEMORY)]


@main.command("verify", short_help="Read every byte and compare it with its checksum.")
@ROOT_ARGUMENT
@STEP_ARGUMENT
@JSON_OPTION
@MEMORY_OPTION
def verify_command(root: Root, step: int | None, as_json: bool, memory: Path | None) -> None:
    """Read every byte of the checkpoints of ROOT, or of one STEP, and compare it with its checksum."""
    with progress_bar(hidden=as_json) as bar:
        verified = _verify_all(root, memory, step, bar)
    _note_verdicts(root, verified)
    results = [result for _, result in verified]
    if as_json:
        print_json(results)
    else:
        table = make_table("step", "where", "condition", "verdict")
        for result in results:
            table.add_row(str(result["step"]), result["place"], result["condition"], result["verdict"])
        show(table)
        for problem in (problem for result in results for problem in result["problems"]):
            click.echo(problem, err=True)
    damaged = [r for r in results if r["problems"]]
    if damaged:
        raise CorruptError(f"{len(damaged)} of {len(results)} copies are damaged")


def _verify_all(
    root: Root, memory: Path | None, step: int | None, bar: Progress
) -> list[tuple[ListedCopy, dict[str, Any]]]:
    """Verifies all copies, and what has come meanwhile in the place of one on storage."""
    verified: list[tuple[ListedCopy, dict[str, Any]]] = []
    todo = _copies_of(root, memory, step)
    while todo:
        now = [(entry, _verify_one(entry, bar)) for entry in todo]
        verified += now
        gone = {one.copy.step for one, result in now if result["verdict"] == _GONE and one.copy.place == STORAGE}
        seen = {(one.copy.checkpoint, str(one.copy.files)) for one, _ in verified}
        todo = []
        with suppress(NotFoundError):
            again = [one for one in _copies_of(root, memory, step) if one.copy.step in gone] if gone else []
            todo = [one for one in again if (one.copy.checkpoint, str(one.copy.files)) not in seen]
    return verified


def _verify_one(entry: ListedCopy, bar: Progress) -> dict[str, Any]:
    task = bar.add_task(f"step {entry.copy.step} in {entry.copy.place}", total=entry.nbytes)
    try:
        problems = verify(entry.copy, lambda nbytes: bar.advance(task, nbytes))
        verdict = "damaged" if problems else "sound"
    except FileNotFoundError:
        problems, verdict = [], _GONE
    return {**entry.to_json(), "verdict": verdict, "problems": [str(problem) for problem in problems]}


def _note_verdicts(root: Root, verified: list[tuple[ListedCopy, dict[str, Any]]]) -> None:
    """Keeps beside the checkpoints what was found on storage, where this may write there: ``rekindle ui`` shows it."""
    news = {
        Verdict.name_of(entry.copy.checkpoint): Verdict(time.time(), not result["problems"])
        for entry, result in verified
        if entry.copy.place == STORAGE and entry.copy.world and result["verdict"] in ("sound", "damaged")
    }
    if news:
        with suppress(OSError):
            store = open_store(root)
            with_timeout(ANSWERS_WITHIN, root, lambda: note_verdicts(store, news))


def _job_of(root: Root, memory: Path | None) -> JobDir:
    return with_timeout(ANSWERS_WITHIN, root, lambda: job_in_memory(root, memory_base(memory)))


@main.command("drill", short_help="Strike a running job with a real fault, and show what it cost.")
@ROOT_ARGUMENT
@click.argument("fault", type=click.Choice(list(FAULTS)))
@click.option("--rank", type=click.IntRange(min=0), help="Rank to strike; the highest rank of this node if unset.")
@click.option("--timeout", default=120.0, show_default=True, help="Seconds to wait for the first new step.")
@JSON_OPTION
@MEMORY_OPTION
def drill_command(root: Root, fault: str, rank: int | None, timeout: float, as_json: bool, memory: Path | None) -> None:
    """Strike the running job of ROOT with a real fault, and show what was noticed, secured and lost, and when.

    \b
    kill       SIGKILL to the rank
    term       SIGTERM to the rank
    stop       SIGSTOP to the rank
    hang       the rank does nothing more, before its next update
    exception  the rank raises, before its next update
    oom        the rank takes memory until the kernel kills it
    agent      SIGKILL to the node's agent

    The watchdog notices 'stop' and 'hang': by default after a minute, with guard(watchdog="fast") after a second and
    three times the longest recent step.
    """
    job = _job_of(root, memory)
    report = drill(job, fault, rank, timeout, lambda line: None if as_json else click.echo(line))
    if as_json:
        print_json(report.to_json())
    elif report.again is not None:
        more = "" if fault == "agent" else ", and the step under way"
        click.echo(f"lost: {report.lost} of {report.step} completed steps{more}")
        if report.incident is not None:
            show(Group("", *make_incident_tables([report.incident])))
    if report.again is None:
        raise RekindleError(f"no new step within {timeout:.0f} s: is there a launcher that starts the ranks again?")


@main.command("stop", short_help="End a job: drain its memory to storage, then give it back.")
@click.argument("root", required=False, callback=parse_root, shell_complete=complete_directory)
@click.option("--stale", is_flag=True, help="End every job, and the files, that have neither a process nor an agent.")
@click.option("--files", is_flag=True, help="Give back the memory of the files of rekindle.save.")
@click.option("--discard", is_flag=True, help="Give memory back at once. What only memory holds is lost.")
@click.option("--timeout", default=600.0, show_default=True, help="Seconds that storage has to take what memory holds.")
@MEMORY_OPTION
def stop_command(
    root: Root | None, stale: bool, files: bool, discard: bool, timeout: float, memory: Path | None
) -> None:
    """End the job of ROOT on all of its nodes: drain what only memory holds to storage, then give the memory back."""
    if (root is not None) + stale + files != 1:
        raise click.UsageError("give one of ROOT, --stale and --files")
    if files:
        stop_files(timeout, memory, discard=discard)
        return
    base = memory_base(memory)
    CompileDir.remove_abandoned(base)
    if root is not None:
        wanted = [job for job in jobs_in_memory(base) if job.path == JobDir.of(root, base).path]
        if not wanted:
            click.echo(f"{root}: has ended, and its step {ended_job(root, base)['durable_step']} is on storage")
    else:
        wanted = [job for job in jobs_in_memory(base) if not job.trainers() and job.agent() is None]
    stale_files = stale and files_are_stale(base)
    failures: list[RekindleError] = []
    if stale_files:
        try:
            stop_files(timeout, memory, discard=discard)
        except RekindleError as error:
            failures.append(error)
    with progress_bar() as bar:
        for job in wanted:
            held, info = job.held_bytes(), job_info(job)
            try:
                name = info.root if info is not None else str(job.path)
                elsewhere = stop(job, timeout, DrainDisplay(bar, name, timeout, info), discard=discard)
                click.echo(f"{job.path}: ended, {decimal(held)} given back")
                for node, what in elsewhere.items():
                    click.echo(f"{node}: {what}")
            except RekindleError as error:
                failures.append(error)
    CompileDir.remove_abandoned(base)
    for extra in failures[:-1]:
        click.echo(f"Error: {extra}", err=True)
    if failures:
        raise failures[-1]
    if stale and not wanted and not stale_files:
        click.echo("nothing is stale")


@main.command("agent", short_help="Serve a job's memory on this node, in the foreground.")
@ROOT_ARGUMENT
@MEMORY_OPTION
def agent(root: Root, memory: Path | None) -> None:
    """Serve the memory of ROOT on this node, in the foreground. Trainers start their agents themselves."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    job = _job_of(root, memory)
    sys.exit(run_agent(job))
