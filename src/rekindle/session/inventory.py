"""Takes an inventory: which checkpoints of a job this rank can see, in memory and on storage."""

from __future__ import annotations

from dataclasses import dataclass, field

from rekindle.common.os_errors import describe_error
from rekindle.common.timeouts import with_timeout
from rekindle.errors import CorruptError, VersionError
from rekindle.format.lineage import CheckpointKey, Incarnation
from rekindle.format.names import MANIFEST, MANIFEST_KIND
from rekindle.format.receipt import parse_document
from rekindle.memory.job_dir import JobDir
from rekindle.storage.catalog import MEMORY, STORAGE, StoredCopy, copies_from
from rekindle.storage.checks import DELETED, FreshStart, checkpoints_deleted
from rekindle.storage.store import Contents, Store

__all__ = ["Inventory", "Offer", "take_inventory"]


@dataclass(frozen=True)
class Offer:
    """One checkpoint as one rank sees it."""

    step: int
    incarnation: Incarnation
    world: int
    places: tuple[str, ...]
    """Stores in which this rank finds the shard that it needs; empty when there are only other ranks' shards."""


@dataclass
class Inventory:
    """What this rank can see: its offers, and the copies behind each one, nearest first."""

    offers: list[Offer]
    copies: dict[CheckpointKey, list[StoredCopy]]
    storage_error: str | None
    errno: int | None = None
    """Of the storage error."""
    damaged: list[str] = field(default_factory=list)
    """Directories with a manifest that can't be read."""
    newer: list[tuple[int, str]] = field(default_factory=list)
    """Steps that a newer version of the format was used for, and what there is to say of each."""
    noted: int = 0
    """The newest step that this node knows to have been on storage."""
    stored: int = 0
    """The newest one that storage shows, damaged or not."""
    deleted: bool = False
    """Whether all that storage had was deleted: the same file system shows nothing of it now."""
    unread: list[tuple[int, str]] = field(default_factory=list)
    """Steps whose manifests can't be read at the moment, and why."""
    half_loaded: bool = False
    """Whether an earlier restore has left this rank's live state half overwritten."""
    anew: FreshStart | None = None
    """What this node knows of a start that began anew because all on storage was deleted."""

    @property
    def anything(self) -> bool:
        """Whether there may be something of an earlier start."""
        return bool(self.offers or self.damaged or self.noted or self.storage_error)

    @property
    def kept(self) -> bool:
        """Whether this node's memory has something of an earlier start, which was not deleted."""
        return not self.deleted and any(copy.place == MEMORY for near in self.copies.values() for copy in near)

    @property
    def storage(self) -> str:
        """In a word, what there is to say of storage: ``DELETED``, "" where there never was anything, or else."""
        if self.deleted:
            return DELETED
        return "in use" if self.stored or self.noted or self.storage_error else ""


_LISTING = 120.0
"""Seconds in which storage must say what there is."""


def take_inventory(job: JobDir | None, store: Store, rank: int) -> Inventory:
    """What this rank could restore from. A rank beyond a smaller world's shards reads those from the start again."""
    error, contents, damaged = None, None, list[tuple[int, str, CorruptError | None]]()
    noted = job.notes.durable() if job is not None else None
    trace, deleted, number = job.notes.root_identity() if job is not None else None, False, None
    try:
        contents, damaged = with_timeout(_LISTING, store.root, lambda: _listed(store))
        if not contents.published:
            deleted = with_timeout(_LISTING, store.root, lambda: checkpoints_deleted(store, noted, trace))
    except OSError as failure:
        error, number = f"{store.root}: {describe_error(failure)}", failure.errno
    copies = copies_from(job, contents)
    found: dict[CheckpointKey, list[StoredCopy]] = {}
    for copy in copies:
        found.setdefault(copy.checkpoint, []).append(copy)
    offers = [
        Offer(*key, near[0].world, tuple(copy.place for copy in near if rank % copy.world in copy.ranks))
        for key, near in found.items()
    ]
    newer = [(step, str(problem)) for step, _, problem in damaged if isinstance(problem, VersionError)]
    stored = max([copy.step for copy in copies if copy.place == STORAGE] + [step for step, _, _ in damaged], default=0)
    unread = contents.unread if contents is not None else []
    places = [place for _, place, _ in damaged]
    return Inventory(offers, found, error, number, places, newer, noted or 0, stored, deleted, unread)


def _listed(store: Store) -> tuple[Contents, list[tuple[int, str, CorruptError | None]]]:
    """What there is; step, place and defect of every manifest that can't be read."""
    contents, damaged = store.contents(), list[tuple[int, str, CorruptError | None]]()
    for step, files in contents.damaged:
        problem = None
        try:
            parse_document(files.read(MANIFEST), MANIFEST_KIND, f"{files}")
        except CorruptError as error:
            problem = error
        except OSError:
            pass
        damaged.append((step, str(files), problem))
    return contents, damaged
