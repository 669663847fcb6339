"""Lists the checkpoints of a root, in memory and on storage, for the commands and the launcher.

``rekindle.storage.catalog`` finds the copies. This module adds their size, time and condition, and the reason why there
are none.
"""

from __future__ import annotations

import datetime
import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rekindle.common.timeouts import with_timeout
from rekindle.errors import FormatError, NotFoundError, RekindleError
from rekindle.format.lineage import Incarnation, superseded_by
from rekindle.format.names import Root, is_job_name, receipt_name
from rekindle.format.receipt import Receipt
from rekindle.memory.job import JobInfo
from rekindle.memory.job_dir import JobDir
from rekindle.storage.catalog import MEMORY, STORAGE, StoredCopy, copies_from
from rekindle.storage.checks import checkpoints_deleted, newest_live
from rekindle.storage.open import open_store
from rekindle.storage.roots import describe_root

__all__ = [
    "ListedCopy",
    "committed_at",
    "list_copies",
    "describe_deleted",
    "iso_time",
    "root_hint",
    "job_info",
    "job_in_memory",
    "jobs_in_memory",
    "list_copies_within",
    "list_kept",
    "read_receipts",
    "list_values",
]

_SHOWN = 10
"""Steps that a message lists at most."""


@dataclass(frozen=True)
class ListedCopy:
    """One copy of a checkpoint, with its size and condition."""

    copy: StoredCopy
    nbytes: int
    condition: str
    """``complete``, ``incomplete`` (a rank of this node lacks it), ``abandoned`` (superseded: the job went on from an
    earlier step), ``damaged`` (its manifest can't be read) or ``copy`` (of what only another node's ranks hold)."""
    saved_at: float | None = None
    """Time at which it was saved into memory or became durable, in seconds since 1970; None where unknown."""

    def to_json(self) -> dict[str, Any]:
        copy = self.copy
        return {
            "step": copy.step,
            "place": copy.place,
            "condition": self.condition,
            "pinned": copy.pinned,
            "saved_at": None if self.saved_at is None else iso_time(self.saved_at),
            "generation": copy.incarnation.generation,
            "incarnation": copy.incarnation.id,
            "continued_from": copy.incarnation.parent_step if copy.incarnation.parent else None,
            "world": copy.world,
            "ranks": sorted(copy.ranks),
            "bytes": self.nbytes,
            "path": str(copy.files),
        }


def list_copies_within(
    root: Root, base: Path, seconds: float
) -> tuple[list[ListedCopy], OSError | RekindleError | None]:
    """Returns what ``list_copies`` does, and an error: the root was deleted, or storage didn't answer in ``seconds``.

    When storage didn't answer, the list is of memory only; the error is raised when memory holds nothing.
    """
    job = JobDir.of(root, base)

    def everywhere() -> list[ListedCopy]:
        noted = job.notes.durable()
        if noted is not None:
            newest_live(open_store(root), noted, (), job.notes.root_identity())  # raises where the root is not mounted
        return list_copies(root, base)

    try:
        listed = with_timeout(seconds, root, everywhere)
        why = None if job.trainers() else describe_deleted(job, seconds)
        return listed, None if why is None else NotFoundError(f"{root}: {why}")
    except RekindleError:
        raise
    except OSError as error:
        with suppress(NotFoundError):
            return list_copies(root, base, stored=False), error
        raise


def list_copies(root: Root, base: Path, step: int | None = None, *, stored: bool = True) -> list[ListedCopy]:
    """Lists every copy of every checkpoint of ``root`` that this node can see, newest first; of one step if given.

    Without ``stored`` storage is not read. Raises NotFoundError when there is none; its message describes what is at
    ``root`` instead.
    """
    job = JobDir.of(root, base)
    job.check()
    info = job.read_job()
    try:
        contents = open_store(root).contents() if stored else None
    except NotADirectoryError as error:
        if copies_from(job, None, own=True):
            raise
        raise NotFoundError(f"{root}: no checkpoint{root_hint(root, base)}") from error
    copies = copies_from(job, contents, own=True)
    seen = {copy.incarnation for copy in copies}
    stands = {entry.stamp.checkpoint: entry for entry in contents.published} if contents is not None else {}
    listed = []
    for copy in copies:
        if step is not None and copy.step != step:
            continue
        local = info.ranks if info is not None and copy.world == info.world else range(copy.world)
        condition = "complete" if copy.place != MEMORY or copy.ranks.issuperset(local) else "incomplete"
        if superseded_by(copy.step, copy.incarnation, seen):
            condition = "abandoned"
        entry = stands[copy.checkpoint] if copy.place == STORAGE else None
        saved_at = committed_at(copy) if entry is None else entry.saved_at
        nbytes = None if entry is None else entry.nbytes  # else an object store takes a request for each rank
        listed.append(ListedCopy(copy, _bytes(copy) if nbytes is None else nbytes, condition, saved_at))
    for number, files in contents.damaged if contents is not None else ():
        if step is None or number == step:
            listed.append(
                ListedCopy(StoredCopy(number, Incarnation(0, ""), 0, STORAGE, files, frozenset(), True), 0, "damaged")
            )
    if not listed:
        raise NotFoundError(f"{root}: {_none_of(step, copies, root, base, stored=stored)}")
    return listed


def list_kept(root: Root, base: Path, step: int | None = None) -> list[ListedCopy]:
    """Lists the copies of another node's snapshots that this node keeps, newest first; of one step if given."""
    job = JobDir.of(root, base)
    job.check()
    copies = copies_from(job.copies, None, own=True)
    return [ListedCopy(copy, _bytes(copy), "copy", committed_at(copy)) for copy in copies if step in (None, copy.step)]


def _none_of(step: int | None, copies: list[StoredCopy], root: Root, base: Path, *, stored: bool) -> str:
    wanted = "no checkpoint" if step is None else f"no checkpoint of step {step}"
    if copies:
        newest = list(dict.fromkeys(str(copy.step) for copy in copies))
        return f"{wanted}: it has {', '.join(newest[:_SHOWN])}{', ...' if len(newest) > _SHOWN else ''}"
    return wanted + (root_hint(root, base) if stored else "")


def root_hint(root: Root, base: Path) -> str:
    """Returns the second half of a message that ``root`` has no checkpoint; empty when nothing more is known."""
    what = describe_root(root, [info.root for job in jobs_in_memory(base) if (info := job_info(job)) is not None])
    return f": {what}" if what else ""


def job_info(job: JobDir) -> JobInfo | None:
    """Reads the job's description; None where it can't be read, which ``rekindle status`` reports."""
    with suppress(OSError, FormatError):
        return job.read_job()
    return None


def job_in_memory(root: Root, base: Path) -> JobDir:
    """Returns the job of ``root`` on this node. Raises NotFoundError when it has no memory here."""
    job = JobDir.of(root, base)
    if not job.path.is_dir():
        raise NotFoundError(f"{root}: has nothing in memory on this node{root_hint(root, base)}")
    return job


def _bytes(copy: StoredCopy) -> int:
    total = 0
    for rank in copy.ranks:
        try:
            total += copy.files.shard_size(rank, copy.world)
        except OSError:
            continue
    return total


def committed_at(copy: StoredCopy) -> float | None:
    """Returns the time since 1970 at which the last rank's part came into memory: receipts are written once."""
    names = [copy.files.named(receipt_name(rank, copy.world)) for rank in copy.ranks]
    try:
        return max(os.stat(name).st_mtime for name in names)
    except OSError:  # recycled for a newer step just now
        return None


def iso_time(seconds: float) -> str:
    """Formats a time in seconds since 1970 as ISO 8601, in UTC."""
    return datetime.datetime.fromtimestamp(seconds, datetime.timezone.utc).isoformat(timespec="seconds")


def read_receipts(copy: StoredCopy) -> Iterator[Receipt]:
    """Yields the receipts of one copy, rank by rank. Raises CorruptError or FileNotFoundError."""
    for rank in sorted(copy.ranks):
        name = receipt_name(rank, copy.world)
        yield Receipt.decode(copy.files.read(name), copy.files.named(name))


def list_values(receipt: Receipt) -> Iterator[tuple[str, Any]]:
    """Yields (path, typed JSON) of every value in the state that is not a tensor."""

    def walk(node: Any, path: str) -> Iterator[tuple[str, Any]]:
        if isinstance(node, list):
            for index, item in enumerate(node):
                yield from walk(item, f"{path}[{index}]")
        elif isinstance(node, dict):
            tag: str = next(iter(node), "")
            body: Any = node.get(tag)
            if tag == "$value":
                yield path, receipt.values[body]
            elif tag == "$tuple":
                yield from walk(body, path)
            elif tag.startswith("$") and tag != "$tensor":
                for key, item in body:
                    yield from walk(item, f"{path}[{key!r}]")
            elif tag != "$tensor":
                for key, item in node.items():
                    yield from walk(item, f"{path}.{key}" if path else key)

    return walk(receipt.structure, "")


def jobs_in_memory(base: Path) -> list[JobDir]:
    """Lists every job that has memory on this node."""
    if not base.is_dir():
        return []
    found = [JobDir(path) for path in sorted(base.iterdir()) if path.is_dir() and is_job_name(path.name)]
    for job in found:
        job.check()
    return found


def describe_deleted(job: JobDir, seconds: float) -> str | None:
    """Describes a job that isn't trained and whose root was deleted while memory still has some of it.

    None where that isn't so, and where storage doesn't answer within ``seconds``.
    """
    info, trace = job_info(job), job.notes.root_identity()
    steps = sorted({stamp.step for stamp, _ in job.snapshots.shard_ids()})
    if info is None or not steps or trace is None:
        return None
    root = info.root
    with suppress(OSError):
        if with_timeout(seconds, root, lambda: checkpoints_deleted(open_store(root), job.notes.durable(), trace)):
            return (
                f"was deleted, and memory still has steps {steps} of it: the next start gives them up, as 'rekindle "
                f"stop --discard ROOT' does; a start with restore(step={steps[-1]}) goes on from there"
            )
    return None
