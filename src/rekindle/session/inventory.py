"""Takes an inventory of a job's checkpoints, and holds the one rule about what a start may go on from.

The rule: no start goes on from less than storage had, unless a person says so by naming the step.

A start that goes on from step n supersedes all that is newer: nobody goes on from that any more, and retention removes
it once the start has a checkpoint of its own on storage. So a start must not take an older step for the newest one only
because storage shows less than it holds. Where nobody has named a step, it is refused

- while storage does not show a step that is known to have been there: a mount is missing, a server is away
  (``refuse_unseen``);
- while the manifest of a newer step can't be read (``refuse_unread``);
- if a newer step was written by a newer version of the format (``refuse_newer_format``);
- if a run that was deleted is on storage again, and another one has begun since (``refuse_two_runs``).

If all that storage had was deleted, nothing is refused: the start begins anew, for whoever deleted it meant that
(``deleted_for_all``). Nobody but a person removes a directory while its file system stays mounted.

``refuse_less`` holds the first three. All of these are pure functions of what the ranks have seen. Whoever writes to
storage has a check of its own, ``rekindle.storage.checks.newest_live``: a mount may also go while a job runs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from rekindle.common.os_errors import describe_error
from rekindle.common.timeouts import with_timeout
from rekindle.errors import CorruptError, NotFoundError, VersionError
from rekindle.format.lineage import CheckpointKey, Incarnation, drop_superseded
from rekindle.format.names import MANIFEST, MANIFEST_KIND, Root
from rekindle.format.receipt import parse_document
from rekindle.memory.job_dir import JobDir
from rekindle.storage.catalog import MEMORY, STORAGE, StoredCopy, copies_from
from rekindle.storage.checks import checkpoints_deleted
from rekindle.storage.store import Contents, Store

__all__ = [
    "FreshStart",
    "Inventory",
    "Offer",
    "Unseen",
    "deleted_for_all",
    "describe_fresh_start",
    "newest_fresh_start",
    "newest_stored",
    "newest_unseen",
    "only_in_deleted_run",
    "refuse_less",
    "refuse_newer_format",
    "refuse_two_runs",
    "refuse_unread",
    "refuse_unseen",
    "take_inventory",
]

FreshStart = tuple[int, int]
"""The note of a start that began anew because all on storage was deleted. See ``Notes.write_fresh_start``."""

_DELETED, _IN_USE, _UNUSED = "deleted", "in use", ""
"""Values of ``Inventory.storage_state``."""
_LISTING = 120.0
"""Seconds in which storage must say what there is."""


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
    """All that one rank sees of a job's checkpoints: its offers, and the copies behind each one, nearest first."""

    root: Root
    offers: list[Offer]
    copies: dict[CheckpointKey, list[StoredCopy]]
    storage_error: str | None
    errno: int | None = None
    """Number of the storage error."""
    damaged: list[str] = field(default_factory=list)
    """Directories with a manifest that can't be read."""
    newer: list[tuple[int, str]] = field(default_factory=list)
    """Steps that a newer version of the format was used for, and a sentence about each."""
    noted: int = 0
    """Newest step that this node knows to have been on storage; 0 if it knows of none."""
    stored: int = 0
    """Newest step that storage shows, damaged or not."""
    deleted: bool = False
    """True if all that storage had was deleted: the same file system shows nothing of it now."""
    unread: list[tuple[int, str]] = field(default_factory=list)
    """Steps whose manifests can't be read at the moment, and why."""
    fresh_start: FreshStart | None = None

    @property
    def anything(self) -> bool:
        """True if there may be something of an earlier start."""
        return bool(self.offers or self.damaged or self.noted or self.storage_error)

    @property
    def in_memory(self) -> bool:
        """True if this node's memory has something of an earlier start, which was not deleted."""
        return not self.deleted and any(copy.place == MEMORY for copy in self.all_copies)

    @property
    def all_copies(self) -> list[StoredCopy]:
        """Copies of all checkpoints, newest first."""
        return [copy for copies in self.copies.values() for copy in copies]

    @property
    def storage_state(self) -> str:
        """One word about storage, for ``deleted_for_all``: deleted, in use, or empty where there never was anything."""
        if self.deleted:
            return _DELETED
        return _IN_USE if self.stored or self.noted or self.storage_error else _UNUSED


# -- looking ---------------------------------------------------------------------------------------------------------


def take_inventory(job: JobDir | None, store: Store, rank: int) -> Inventory:
    """Lists what this rank could restore from. A rank beyond a smaller world's shards begins again with the first."""
    inventory = Inventory(store.root, [], {}, None)
    contents, damaged = None, list[tuple[int, str, CorruptError | None]]()
    noted = job.notes.durable() if job is not None else None
    identity = job.notes.root_identity() if job is not None else None
    inventory.noted, inventory.fresh_start = noted or 0, job.notes.fresh_start() if job is not None else None
    try:
        contents, damaged = with_timeout(_LISTING, store.root, lambda: _list_storage(store))
        if not contents.published:
            inventory.deleted = with_timeout(_LISTING, store.root, lambda: checkpoints_deleted(store, noted, identity))
    except OSError as error:
        inventory.storage_error, inventory.errno = f"{store.root}: {describe_error(error)}", error.errno
    copies = copies_from(job, contents)
    for copy in copies:
        inventory.copies.setdefault(copy.checkpoint, []).append(copy)
    inventory.offers = [
        Offer(*key, near[0].world, tuple({copy.place: None for copy in near if rank % copy.world in copy.ranks}))
        for key, near in inventory.copies.items()
    ]
    shown = [copy.step for copy in copies if copy.place == STORAGE] + [step for step, _, _ in damaged]
    inventory.stored = max(shown, default=0)
    inventory.damaged = [place for _, place, _ in damaged]
    inventory.newer = [(step, str(problem)) for step, _, problem in damaged if isinstance(problem, VersionError)]
    inventory.unread = contents.unread if contents is not None else []
    return inventory


def _list_storage(store: Store) -> tuple[Contents, list[tuple[int, str, CorruptError | None]]]:
    """Lists what storage has, and the step, place and defect of every manifest that can't be read."""
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


def newest_stored(copies: Collection[StoredCopy], base: CheckpointKey | None) -> int | None:
    """Returns the newest step on storage for a start that goes on from ``base``, wherever it read ``base`` from."""
    if base is None:
        return None
    stands = [copy for copy in drop_superseded(copies) if copy.place == STORAGE]
    return max((copy.step for copy in stands if copy.checkpoint == base or copy.step < base.step), default=None)


def newest_fresh_start(inventories: Sequence[Inventory]) -> FreshStart | None:
    """Returns the newest note of a start that began anew, on any node."""
    return max((one.fresh_start for one in inventories if one.fresh_start is not None), default=None)


# -- the rule --------------------------------------------------------------------------------------------------------


def refuse_less(step: int, inventories: Sequence[Inventory], instead: str) -> None:
    """Raises NotFoundError or VersionError if to go on from ``step`` is to go on from less than storage had.

    Step 0 stands for a start from nothing. ``instead`` tells a person how to do it all the same.
    """
    refuse_unseen(step, inventories, instead)
    refuse_unread(step, (entry for inventory in inventories for entry in inventory.unread), instead)
    refuse_newer_format(step, inventories, instead)


class Unseen(NamedTuple):
    """The newest step that storage is known to have had, and does not show now."""

    step: int
    why: str
    """Sentence that says so, and what to do about it."""


def newest_unseen(inventories: Sequence[Inventory]) -> Unseen | None:
    """Finds a step that a node knows to have been on storage, or that one rank sees there, and another rank doesn't.

    All inventories must be of one moment, or a step that becomes durable in between would seem to be missing.
    """
    had = max(max(inventory.noted, inventory.stored) for inventory in inventories)
    blind = [rank for rank, inventory in enumerate(inventories) if inventory.stored < had]
    if not blind:
        return None
    root = inventories[blind[0]].root
    error = next((inventories[rank].storage_error for rank in blind if inventories[rank].storage_error), None)
    what = f"which can't be read now ({error})" if error else f"and {root} shows nothing of it now"
    where = f" on rank {blind[0]}" if len(blind) < len(inventories) else ""
    return Unseen(had, f"step {had} was on storage, {what}{where}: see that it is mounted")


def refuse_unseen(step: int, inventories: Sequence[Inventory], instead: str) -> None:
    """Raises NotFoundError if storage does not show a newer step that it had: it may do so again soon."""
    unseen = newest_unseen(inventories)
    if unseen is not None and unseen.step > step:
        raise NotFoundError(f"{unseen.why}; {instead}")


def refuse_unread(step: int, unread: Iterable[tuple[int, str]], instead: str) -> None:
    """Raises NotFoundError if storage has a newer step that can't be read: it may be the job's newest one.

    ``unread`` is that of ``Contents``, or of several.
    """
    newest, why = max(unread, default=(step, ""))
    if newest > step:
        raise NotFoundError(f"step {newest} is on storage, and can't be read: {why}; {instead}")


def refuse_newer_format(step: int, inventories: Sequence[Inventory], instead: str) -> None:
    """Raises VersionError if a newer step was written by a newer Rekindle: to go back is for a person to decide."""
    newer = [entry for inventory in inventories for entry in inventory.newer if entry[0] > step]
    if newer:
        raise VersionError(f"{max(newer)[1]}; {instead}")


def refuse_two_runs(offers: Iterable[Offer], fresh_start: FreshStart, on_purpose: Callable[[int], str]) -> None:
    """Raises NotFoundError if storage shows a run that was deleted, and another one that began since exists, too.

    ``offers`` are those of all ranks; ``on_purpose`` tells how to go on from a step.
    """
    since, until = fresh_start
    offers = list(offers)
    back = [o.step for o in offers if o.incarnation.generation < since and STORAGE in o.places]
    begun = [o.step for o in offers if since <= o.incarnation.generation < until]
    chosen = any(o.incarnation.generation >= until for o in offers)
    if back and begun and not chosen:
        raise NotFoundError(
            f"step {max(back)} is on storage again, which showed nothing when the job began anew and came to step "
            f"{max(begun)}: say which of the two runs counts; the other one is then superseded. For the one that is "
            f"back: {on_purpose(max(back))}. For the one that was begun anew: {on_purpose(max(begun))}"
        )


def only_in_deleted_run(step: int, found: Iterable[Offer | StoredCopy], fresh_start: FreshStart) -> bool:
    """Returns True if ``step``, which a person named, is only in a run that was deleted, and is back perhaps.

    Then what was begun anew since must be left out: it supersedes that run.
    """
    return not any(one.step == step and one.incarnation.generation >= fresh_start[0] for one in found)


def deleted_for_all(states: Collection[str]) -> bool:
    """Returns True if all that storage had was deleted, by each rank's ``Inventory.storage_state``.

    One rank must have seen that, and no rank may see storage in use, or miss something there.
    """
    return _DELETED in states and not set(states) - {_DELETED, _UNUSED}


def describe_fresh_start(root: Root) -> str:
    """Returns the message of a job that starts anew because its checkpoints were deleted."""
    return (
        f"checkpoints of an earlier run were deleted from {root}: starting anew from step 0; what memory still has of "
        "that run is given up"
    )
