"""Defines the command ``flush``, and what ``ls``, ``status`` and ``stop`` do with files."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click
from rich.filesize import decimal

from rekindle.agent.drain import TICK
from rekindle.agent.file_drain import FileDrainer
from rekindle.agent.http import send_request
from rekindle.cli.terminal import MEMORY_OPTION, WaitDisplay, local_time, make_table, print_json, progress_bar, show
from rekindle.common.timeouts import check_timeout, in_background
from rekindle.errors import AgentError, BusyError, NotDurableError
from rekindle.files.flushing import check_there, describe_pending, pending_files
from rekindle.files.listing import list_files
from rekindle.files.saving import canonical_target_within
from rekindle.memory.files_dir import FilesDir
from rekindle.memory.job_dir import memory_base
from rekindle.memory.kept import key_of
from rekindle.memory.lock import Lock

__all__ = [
    "NO_FILES",
    "facts_of_files",
    "files_are_stale",
    "files_status",
    "flush_command",
    "list_command",
    "stop_files",
]

NO_FILES = "no files are in this node's memory, in {}"
_STATES = {"memory": "in memory, on its way", "both": "on storage and in memory"}


def list_command(memory: Path | None, *, as_json: bool) -> None:
    """Lists the files in this node's memory."""
    base = memory_base(memory)
    found = list_files(FilesDir.below(base))
    if as_json:
        print_json([file.to_json() for file in found])
        return
    if not found:
        click.echo(NO_FILES.format(base))
        return
    table = make_table("saved", "size", "state", "path", "problem", may_fold=("path", "problem"))
    for file in found:
        state = _STATES[file.state]
        table.add_row(local_time(file.saved_at), decimal(file.nbytes), state, file.path, file.problem or "")
    show(table)


@click.command("flush", short_help="Wait until files are on storage.")
@click.argument("path", required=False)
@click.option("--timeout", default=600.0, show_default=True, help="Seconds that storage has to take them.")
@MEMORY_OPTION
def flush_command(path: str | None, timeout: float, memory: Path | None) -> None:
    """Wait until all files in this node's memory are on storage, or that of PATH. Carry them where no agent does."""
    store = FilesDir.below(memory_base(memory))
    target = None if path is None else canonical_target_within(path, follow=True)
    _flush(store, target, timeout)
    if target is not None and store.kept.find(key_of(target)) is None:  # given up, or never there
        check_there(target)
    click.echo(f"{path or 'all files'}: on storage")


def _flush(store: FilesDir, target: str | None, timeout: float) -> None:
    """Waits for files. Carries them in this process while nobody holds the agent's lock."""
    until = time.monotonic() + check_timeout(timeout)
    if not store.kept_path.is_dir():
        return
    store.check()
    lock, drainer = Lock(store.paths.agent_lock), FileDrainer(store)
    with progress_bar() as bar:
        display = WaitDisplay(bar, "files", timeout)
        try:
            while pending := pending_files(store, target):
                ours = lock.held() or lock.acquire()
                if ours:
                    tick = in_background(drainer.tick, "rekindle-flush")  # storage may hang
                    while not tick.done() and time.monotonic() < until:
                        _show(display, len(pending), vars(drainer.progress))
                        time.sleep(TICK)
                    store.notes.write_agent_status({"error": None, "failed": drainer.progress.failed})
                _show(display, len(pending), vars(drainer.progress) if ours else _ask_agent(store))
                if time.monotonic() > until:
                    raise NotDurableError(describe_pending(store, pending, timeout))
                time.sleep(TICK)
        finally:
            lock.release()


def _ask_agent(store: FilesDir) -> Mapping[str, Any]:
    """Returns the agent's progress; nothing of it where a process that saves is the agent, or none answers."""
    try:
        return send_request(store.paths.agent_socket, "GET", "/status", timeout=2.0)
    except AgentError:
        return {}


def _show(display: WaitDisplay, pending: int, progress: Mapping[str, Any]) -> None:
    why = f"{pending} not on storage yet"
    path, done, total = progress.get("path"), progress.get("done", 0), progress.get("total", 0)
    if progress.get("error"):
        why = f"{why}: {progress['error']}"
    elif path is not None:
        why = f"{why}: storage has {decimal(done)} of {decimal(total)} of {path}"
    display.show(path and path.rsplit("/", 1)[-1], done, total, why)


def files_status(base: Path) -> dict[str, Any] | None:
    """Returns the status of the files in this node's memory, as ``rekindle status --files --json`` shows it.

    None where there are none. ``problem`` is None when all is well.
    """
    store = FilesDir.below(base)
    if not store.kept_path.is_dir():
        return None
    found, agent, processes = list_files(store), store.agent(), sorted(store.trainers())
    waiting = [file for file in found if file.state == "memory"]
    drain, problem = None, (store.notes.drain_error() if waiting else None) or None
    if agent is None and waiting:
        problem = f"{len(waiting)} file(s) are only in memory, and no agent carries them: run 'rekindle flush'"
    elif agent is not None and agent not in processes:
        try:
            drain = send_request(store.paths.agent_socket, "GET", "/status")
            problem = drain["error"]
        except AgentError as error:
            problem = str(error)
    return {
        "directory": str(store.path),
        "processes": processes,
        "agent": agent,
        "memory_bytes": store.held_bytes(),
        "files": len(found),
        "waiting": len(waiting),
        "problem": problem,
        "drain": drain,
    }


def facts_of_files(status: dict[str, Any]) -> dict[str, str]:
    """Returns the lines that a person is shown of ``files_status``."""
    drain = status["drain"] or {}
    facts = {
        "processes": " ".join(map(str, status["processes"])) or "none",
        "agent": str(status["agent"] or "none"),
        "files": f"{status['files']} ({decimal(status['memory_bytes'])}), {status['waiting']} not on storage yet",
    }
    if drain.get("path"):
        facts["carrying"] = f"{drain['path']}: {100 * drain['done'] // max(drain['total'], 1)} %"
    return facts


def files_are_stale(base: Path) -> bool:
    """True if there are files in this node's memory that nobody uses and no agent serves."""
    store = FilesDir.below(base)
    return store.path.is_dir() and not store.trainers() and store.agent() is None


def stop_files(timeout: float, memory: Path | None, *, discard: bool) -> None:
    """Ends the agent of files and gives their memory back, once all are on storage. ``discard``: at once."""
    store = FilesDir.below(memory_base(memory))
    if not store.path.is_dir():
        click.echo(NO_FILES.format(store.path.parent))
        return
    store.check()
    if store.trainers():
        raise BusyError(f"{store.path}: is used by processes {sorted(store.trainers())}: end them first")
    held = store.held_bytes()
    if not discard:
        _flush(store, None, timeout)
    if not store.remove(discard=discard):
        raise BusyError(f"{store.path}: a process saves files again, so their memory stays")
    click.echo(f"{store.path}: ended, {decimal(held)} given back")
