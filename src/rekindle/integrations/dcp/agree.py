"""Agreement of the ranks on one start of a job: who they are, what they go on from, and the number of each save."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from rekindle.errors import NotFoundError, UsageError
from rekindle.format.lineage import CheckpointKey, Incarnation, ShardId, drop_superseded
from rekindle.format.names import MAX_STEP, Root
from rekindle.integrations.dcp.away import gone, on_purpose
from rekindle.storage.catalog import MEMORY, STORAGE, StoredCopy, newest_stored, refuse_behind
from rekindle.storage.checks import deleted_for_all, describe_fresh_start

__all__ = ["Arrival", "CheckpointKey", "Offer", "Ruling", "Start", "agree", "begin", "number"]


@dataclass(frozen=True)
class Arrival:
    """What a rank sees that has not begun."""

    place: str
    """Equal on ranks that share one memory store."""
    no_memory: str | None
    """Why its memory can't be had; None when it can."""
    problem: str | None
    """Why storage can't be listed; None when it can."""
    loaded: dict[CheckpointKey, bool]
    """What it has loaded, and whether it had asked for that very step."""
    copies: list[StoredCopy]
    unread: list[tuple[int, str]]
    unseen: int
    """A step that is known to have been on storage, which shows nothing so new now; else 0."""
    storage: str
    """See ``deleted_for_all``."""


@dataclass(frozen=True)
class Start:
    """What all ranks of a start go by from its first save on."""

    incarnation: Incarnation
    places: list[str]
    """By rank."""
    no_memory: dict[str, str]
    """By place: why snapshots can't go into its memory."""
    stored: int | None
    """The newest step that storage has of what this start goes on from."""
    anyway: bool
    """Whether that was asked for by its step on all ranks, or it begins ``anew``."""
    anew: bool
    """Whether what an earlier start had on storage was deleted: what memory still has of it counts no more."""
    awaited: ShardId | None
    """What an earlier start has left in memory and storage lacks."""
    warning: str | None
    """What the coordinator's log should say."""

    @property
    def world(self) -> int:
        return len(self.places)

    def local_ranks(self, rank: int) -> list[int]:
        """The ranks on that one's node, in order."""
        return [other for other, place in enumerate(self.places) if place == self.places[rank]]


@dataclass(frozen=True)
class Offer:
    """What a rank brings to a save."""

    rank: int
    ticket: str
    """Drawn for this rank and this save: what the answer goes to."""
    wanted: int | None
    """The step that it was given."""
    step: int
    """The newest that it knows to have been used."""
    settings: dict[str, Any]
    """What every rank must have been given alike."""
    start: Start | None
    """What it goes by, if it has begun."""
    arrival: Arrival | None
    """What it sees, if it has not."""


@dataclass(frozen=True)
class Ruling:
    """What the coordinator has settled about a save, the same for all ranks."""

    step: int
    save: str
    start: Start


def agree(root: Root, offers: Sequence[Offer], keep: int | None) -> Ruling:
    """Settle a save, for which these are the offers of all ranks in order.

    Raises UsageError where it would not be one checkpoint of all ranks, NotFoundError where storage is away.
    """
    _compare(root, offers)
    start = next((offer.start for offer in offers if offer.start is not None), None)
    if start is None:
        start = begin(root, [offer.arrival for offer in offers if offer.arrival is not None], keep)
    if start.world != len(offers):
        raise UsageError(
            f"{len(offers)} rank(s) save to {root}, and {start.world} did before: all saves to one root are made by "
            "the same ranks; give the others a root of their own"
        )
    newest = max([start.incarnation.parent_step if start.incarnation.parent else -1, *(o.step for o in offers)])
    return Ruling(number(root, offers[0].wanted, newest), secrets.token_hex(8), start)


def _compare(root: Root, offers: Sequence[Offer]) -> None:
    for offer in offers:
        if offer.wanted != offers[0].wanted:
            raise UsageError(
                f"rank 0 saves {_named(offers[0].wanted)}, and rank {offer.rank} {_named(offer.wanted)}: give all the "
                "same checkpoint_id"
            )
        ours, first = offer.settings, offers[0].settings
        for name in (name for name in ours if ours[name] != first[name]):
            raise UsageError(f"{name} is {ours[name]} on rank {offer.rank} and {first[name]} on rank 0")


def _named(wanted: int | None) -> str:
    return "the next step" if wanted is None else f"step {wanted}"


def number(root: Root, wanted: int | None, newest: int) -> int:
    """The step of a save, of ``wanted`` or of the number after the ``newest``. Raises UsageError if it is no newer."""
    step = max(newest + 1, 1) if wanted is None else wanted
    if not 0 <= step <= MAX_STEP:
        raise UsageError(f"step {step}: must be a whole number of 0 to {MAX_STEP}")
    if step <= newest:
        raise UsageError(
            f"step {step} after step {newest} in {root}: steps must grow, for no checkpoint is written over. To go "
            "back to an older one, load it in a new process before the first save; to begin anew, use a new root"
        )
    return step


def begin(root: Root, arrivals: Sequence[Arrival], keep: int | None) -> Start:
    """Agree on what a start goes on from: the newest that all ranks have loaded, else the newest there is."""
    for trouble in (arrival.problem for arrival in arrivals if arrival.problem):
        raise NotFoundError(trouble)
    copies = [copy for arrival in arrivals for copy in arrival.copies]
    ranks: dict[CheckpointKey, set[int]] = {}
    for copy in drop_superseded(copies):
        ranks.setdefault(copy.checkpoint, set()).update(copy.ranks)
    whole = [copy.checkpoint for copy in copies if ranks.get(copy.checkpoint, set()).issuperset(range(copy.world))]
    loaded = set.intersection(*(set(arrival.loaded) for arrival in arrivals))
    anew = not loaded and deleted_for_all([arrival.storage for arrival in arrivals])
    base = max(loaded, default=None) or (None if anew else max(whole, default=None))
    named = base is not None and all(arrival.loaded.get(base) for arrival in arrivals)
    warning = describe_fresh_start(root) if anew else None
    if not named and not anew:
        step = base[0] if base is not None else 0
        refuse_behind(step, (one for arrival in arrivals for one in arrival.unread), on_purpose(step))
        unseen = max(arrival.unseen for arrival in arrivals)
        if unseen and (step < unseen or keep is None):
            raise NotFoundError(gone(root, unseen, step))
        if unseen:
            warning = f"what is saved stays in memory: {gone(root, unseen, step)}"
    incarnation = Incarnation.begin(1 + max((copy.incarnation.generation for copy in copies), default=0))
    if base is not None:
        incarnation = replace(incarnation, parent=base[1].id, parent_step=base[0])
    return Start(
        incarnation,
        [arrival.place for arrival in arrivals],
        {arrival.place: arrival.no_memory for arrival in arrivals if arrival.no_memory},
        newest_stored(copies, base),
        named or anew,
        anew,
        _awaited(base, copies) if keep is None else None,
        warning,
    )


def _awaited(base: CheckpointKey | None, copies: Sequence[StoredCopy]) -> ShardId | None:
    """Where every checkpoint is to reach storage, the one that the last start left in memory is no exception."""
    durable = max((copy.step for copy in copies if copy.place == STORAGE), default=-1)
    waits = (c for c in copies if c.checkpoint == base and c.place == MEMORY and c.persist and c.step > durable)
    return next((copy.stamp for copy in waits), None)
