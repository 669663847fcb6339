"""Agrees on one start of a job: who its ranks are, what they go on from, and the number of each save.

DCP's ranks have no collectives of ours: what each of them has to say reaches the coordinator with its plan (see
``messages``), and the functions here are pure functions of all that.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rekindle.errors import NotFoundError, UsageError
from rekindle.format.lineage import CheckpointKey, Incarnation, ShardId, drop_superseded
from rekindle.format.names import MAX_STEP, Root
from rekindle.session.inventory import (
    Inventory,
    deleted_for_all,
    describe_fresh_start,
    newest_fresh_start,
    newest_stored,
    newest_unseen,
    refuse_less,
    refuse_two_runs,
)
from rekindle.session.residence import Residence, refuse_split_nodes
from rekindle.session.session import Meeting
from rekindle.storage.catalog import MEMORY, STORAGE, StoredCopy

__all__ = ["Arrival", "SaveDecision", "SaveRequest", "Start", "agree", "begin", "choose_step", "on_purpose"]


@dataclass(frozen=True)
class Arrival:
    """A rank's word before its start has begun: what it sees, and what it has loaded."""

    residence: Residence
    no_memory: str | None
    """Reason why its memory can't be had; None when it can."""
    loaded: dict[CheckpointKey, bool]
    """Checkpoints that it has loaded; True where it had asked for that very step."""
    inventory: Inventory


@dataclass(frozen=True)
class Start:
    """The agreement of a start's ranks, which they go by from its first save on."""

    incarnation: Incarnation
    nodes: list[str]
    """By rank."""
    no_memory: dict[str, str]
    """By node: the reason why snapshots can't go into its memory."""
    base: CheckpointKey | None
    """The checkpoint that it goes on from."""
    stored: int | None
    """Newest step that storage has of that."""
    chosen: bool
    """True if all ranks had asked for that very step."""
    back: bool
    """True if it is of a run that was deleted, and is there again."""
    deleted: bool
    """True if what an earlier start had on storage was deleted: what memory still has of it counts no more."""
    awaited: ShardId | None
    """A checkpoint that an earlier start left in memory and storage lacks, to be waited for."""
    warning: str | None
    """A line for the coordinator's log."""

    @property
    def world(self) -> int:
        return len(self.nodes)

    def meeting(self, rank: int) -> Meeting:
        """Returns what a session of that rank needs to know of it."""
        node = self.nodes[rank]
        return Meeting(
            incarnation=self.incarnation,
            world=self.world,
            local_ranks=[other for other, its_node in enumerate(self.nodes) if its_node == node],
            nodes=len(set(self.nodes)),
            no_memory=self.no_memory.get(node),
            found=self.base is not None,
            deleted=self.deleted,
        )


@dataclass(frozen=True)
class SaveRequest:
    """A rank's word to the coordinator of a save."""

    rank: int
    ticket: str
    """Drawn for this rank and this save: the answer goes to the box of this name."""
    wanted: int | None
    """Step that it was given, if any."""
    step: int
    """Newest step that it knows to have been used."""
    settings: dict[str, Any]
    """Settings that every rank must have been given alike."""
    start: Start | None
    """Agreement that it goes by, if it has begun."""
    arrival: Arrival | None
    """Its arrival, if it has not."""


@dataclass(frozen=True)
class SaveDecision:
    """The coordinator's answer, the same for all ranks of a save."""

    step: int
    save: str
    """Drawn for this save: shards of two saves are never combined."""
    start: Start


def agree(root: Root, requests: Sequence[SaveRequest], keep: int | None) -> SaveDecision:
    """Decides on a save, for which these are the requests of all ranks in order.

    Raises UsageError where it would not be one checkpoint of all ranks, NotFoundError where storage is away.
    """
    _compare(root, requests)
    start = next((request.start for request in requests if request.start is not None), None)
    if start is None:
        start = begin(root, [request.arrival for request in requests if request.arrival is not None], keep)
    if start.world != len(requests):
        raise UsageError(
            f"{len(requests)} rank(s) save to {root}, and {start.world} did before: all saves to one root are made by "
            "the same ranks; give the others a root of their own"
        )
    newest = max([start.base.step if start.base is not None else -1, *(request.step for request in requests)])
    return SaveDecision(choose_step(root, requests[0].wanted, newest), secrets.token_hex(8), start)


def _compare(root: Root, requests: Sequence[SaveRequest]) -> None:
    """Raises UsageError if ranks were given different steps or settings."""
    for request in requests:
        if request.wanted != requests[0].wanted:
            raise UsageError(
                f"rank 0 saves {_named(requests[0].wanted)}, and rank {request.rank} {_named(request.wanted)}: give "
                "all the same checkpoint_id"
            )
        ours, first = request.settings, requests[0].settings
        for name in (name for name in ours if ours[name] != first[name]):
            raise UsageError(f"{name} is {ours[name]} on rank {request.rank} and {first[name]} on rank 0")


def _named(wanted: int | None) -> str:
    return "the next step" if wanted is None else f"step {wanted}"


def choose_step(root: Root, wanted: int | None, newest: int) -> int:
    """Chooses the step of a save: ``wanted``, or the number after the ``newest``.

    Raises UsageError if ``wanted`` is no newer.
    """
    step = max(newest + 1, 1) if wanted is None else wanted
    if not 0 <= step <= MAX_STEP:
        raise UsageError(f"step {step}: must be a whole number of 0 to {MAX_STEP}")
    if step <= newest:
        raise UsageError(
            f"step {step} after step {newest} in {root}: steps must grow, for no checkpoint is written over. To go "
            "back to an older one, load it in a new process before the first save; to begin anew, use a new root"
        )
    return step


def on_purpose(step: int) -> str:
    """Tells a person how to go on from ``step``, or from nothing, though storage shows less than it had."""
    less = f"to go on from step {step} on purpose, load it by checkpoint_id={step}; " if step else ""
    return f"{less}to begin anew, use a new root"


def begin(root: Root, arrivals: Sequence[Arrival], keep: int | None) -> Start:
    """Agrees on what a start goes on from: the newest that all ranks have loaded, else the newest there is.

    Raises NotFoundError or VersionError where that is less than storage had, and nobody has asked for that very step;
    UsageError where ranks of one node have different memory stores.
    """
    refuse_split_nodes([arrival.residence for arrival in arrivals])
    inventories = [arrival.inventory for arrival in arrivals]
    for error in (inventory.storage_error for inventory in inventories if inventory.storage_error):
        raise NotFoundError(f"storage can't be listed: {error}")
    copies = [copy for inventory in inventories for copy in inventory.all_copies]
    loaded = set.intersection(*(set(arrival.loaded) for arrival in arrivals))
    deleted = not loaded and deleted_for_all([inventory.storage_state for inventory in inventories])
    base = max(loaded, default=None) or (None if deleted else max(_whole(copies), default=None))
    chosen = base is not None and all(arrival.loaded.get(base) for arrival in arrivals)
    warning = describe_fresh_start(root) if deleted else None
    if not chosen and not deleted:
        warning = _refuse_less(base, inventories, keep)
    fresh = newest_fresh_start(inventories)
    return Start(
        incarnation=Incarnation.begin(1 + max((copy.incarnation.generation for copy in copies), default=0)),
        nodes=[arrival.residence.node for arrival in arrivals],
        no_memory={arrival.residence.node: arrival.no_memory for arrival in arrivals if arrival.no_memory},
        base=base,
        stored=newest_stored(copies, base),
        chosen=chosen,
        back=base is not None and fresh is not None and base.incarnation.generation < fresh[0],
        deleted=deleted,
        awaited=_awaited(base, copies) if keep is None else None,
        warning=warning,
    )


def _whole(copies: Sequence[StoredCopy]) -> Iterator[CheckpointKey]:
    """Iterates over the checkpoints of which every rank's shard exists, and that no later start superseded."""
    ranks: dict[CheckpointKey, set[int]] = {}
    for copy in drop_superseded(copies):
        ranks.setdefault(copy.checkpoint, set()).update(copy.ranks)
    return (copy.checkpoint for copy in copies if ranks.get(copy.checkpoint, set()).issuperset(range(copy.world)))


def _refuse_less(base: CheckpointKey | None, inventories: Sequence[Inventory], keep: int | None) -> str | None:
    """Raises where ``base`` is less than storage had. Returns a warning if memory has as much, and storage is away.

    Each inventory is looked at by itself: ranks take theirs as they come, so that a step which becomes durable in
    between is no sign of a missing mount.
    """
    step = base.step if base is not None else 0
    for inventory in inventories:
        refuse_less(step, [inventory], on_purpose(step))
    if (fresh := newest_fresh_start(inventories)) is not None:
        refuse_two_runs((offer for one in inventories for offer in one.offers), fresh, on_purpose)
    unseen = max(filter(None, (newest_unseen([inventory]) for inventory in inventories)), default=None)
    if unseen is None:
        return None
    if keep is None:  # every checkpoint is to stay on storage: what is written below a mount point would be lost
        raise NotFoundError(f"{unseen.why}; {on_purpose(step)}")
    return f"saves stay in memory: {unseen.why}; {on_purpose(step)}"


def _awaited(base: CheckpointKey | None, copies: Sequence[StoredCopy]) -> ShardId | None:
    """Finds the checkpoint that the last start left in memory alone: where all are to reach storage, it is one."""
    durable = max((copy.step for copy in copies if copy.place == STORAGE), default=-1)
    waits = (c for c in copies if c.checkpoint == base and c.place == MEMORY and c.persist and c.step > durable)
    return next((copy.stamp for copy in waits), None)
