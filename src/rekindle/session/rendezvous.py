"""Lets the ranks of a start meet: by collectives, they agree on who they are and what they have."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

from rekindle.common.os_errors import describe_error
from rekindle.errors import BusyError, UsageError
from rekindle.format.claim import Starts
from rekindle.format.lineage import Incarnation
from rekindle.memory.job_dir import JobDir
from rekindle.memory.room import Room
from rekindle.memory.starts import read_starts
from rekindle.session.claiming import stake_claim
from rekindle.session.group import ProcessGroup, SingleProcess
from rekindle.session.inventory import deleted_for_all, take_inventory
from rekindle.session.residence import Residence, refuse_split_nodes, residence_of
from rekindle.session.root_check import RootProbe, find_refusal, refuse_root, warn_of_capability
from rekindle.session.session import Meeting, Session

__all__ = ["meet"]

log = logging.getLogger("rekindle")


class _Arrival(NamedTuple):
    """One rank's word in the first round."""

    residence: Residence
    busy: str | None
    """Message about another trainer that has its place; None when there is none."""
    given: dict[str, Any]
    """Settings that all ranks must have been given alike."""


class _Report(NamedTuple):
    """One rank's word in the second round."""

    no_memory: str | None
    generation: int
    """Highest generation that it sees."""
    begun: str
    """Id of an incarnation that begins now: that of rank 0 is taken."""
    anything: bool
    in_memory: bool
    storage_state: str
    """These three are properties of its ``Inventory``."""
    problem: str | None
    """Reason why the root can't be used."""
    starts: Starts | None
    """Starts that its node remembers, on the first rank of each; None where it remembers none."""
    used: bool | None
    """True if storage has checkpoints; None where it doesn't answer."""


def meet(
    group: SingleProcess | ProcessGroup,
    session: Session,
    size: Callable[[list[int]], int],
    room: Room,
    settings: dict[str, Any],
) -> Meeting:
    """Takes this rank's place, and agrees with all others. A collective of some rounds.

    ``size``, a collective too, is given the ranks of this node and returns the bytes that a snapshot of this one will
    take. ``room`` bounds what all may take on a node. ``settings`` are what every rank must have been given alike.

    Raises MissingRankError for ranks that don't come. Raises BusyError or UsageError, on all ranks: also where the root
    can't be written to, or nodes don't see the same one, unless memory has something to go on from.
    """
    busy = session.take_place(group.rank)
    try:
        return _agree(group, session, busy, size, room, settings)
    except BaseException:
        session.release_place()
        raise


def _agree(
    group: SingleProcess | ProcessGroup,
    session: Session,
    busy: str | None,
    size: Callable[[list[int]], int],
    room: Room,
    settings: dict[str, Any],
) -> Meeting:
    job = session.job_dir
    own = _Arrival(residence_of(session), busy, {"root": str(session.root), **settings})
    group.await_all()
    arrivals: list[_Arrival] = group.gather(own)
    _refuse_differences(arrivals)
    refuse_split_nodes([arrival.residence for arrival in arrivals])
    nodes = [arrival.residence.node for arrival in arrivals]
    local_ranks = [rank for rank, node in enumerate(nodes) if node == own.residence.node]
    nbytes = size(local_ranks)
    no_memory = session.no_memory or _lacking(job, nbytes, len(local_ranks), room)
    reports = _look(group, session, nodes, no_memory)
    no_memory = next((reports[rank].no_memory for rank in local_ranks if reports[rank].no_memory), None)
    if no_memory is None and group.rank == local_ranks[0]:
        with suppress(OSError):
            log.info("%s", room.describe(job, nbytes, len(local_ranks)))
    deleted = deleted_for_all([report.storage_state for report in reports])
    first = session.job if group.rank == local_ranks[0] else None
    begun = Incarnation(1 + max(report.generation for report in reports), reports[0].begun)
    remembered = [report.starts for report in reports]
    stake = stake_claim(group, session.store, first, begun, nodes, remembered, used=reports[0].used)
    return Meeting(
        incarnation=Incarnation(stake.starts.own.generation, begun.id),
        world=group.world,
        local_ranks=local_ranks,
        nodes=len(set(nodes)),
        no_memory=no_memory,
        found=not deleted and any(report.anything for report in reports),
        deleted=deleted,
        nbytes=nbytes,
        stake=stake,
    )


def _look(
    group: SingleProcess | ProcessGroup, session: Session, nodes: list[str], no_memory: str | None
) -> list[_Report]:
    """Looks at memory and storage. Returns the reports of all ranks. Raises UsageError if one can't use its root."""
    store = session.store
    with RootProbe(group, store, nodes) as probe:
        inventory = take_inventory(session.job, store, group.rank)
        first_on_node = nodes.index(nodes[group.rank]) == group.rank
        problem = (find_refusal(store, inventory) if first_on_node else None) or probe.problem()
        reports: list[_Report] = group.gather(
            _Report(
                no_memory=no_memory,
                generation=max((offer.incarnation.generation for offer in inventory.offers), default=0),
                begun=Incarnation.begin(0).id,
                anything=inventory.anything,
                in_memory=inventory.in_memory,
                storage_state=inventory.storage_state,
                problem=problem,
                starts=_remembered(session.job) if first_on_node else None,
                used=bool(inventory.stored) if inventory.storage_error is None else None,
            )
        )
    restart = any(report.in_memory for report in reports)
    refuse_root([report.problem for report in reports], restart=restart, rank=group.rank)
    if group.rank == 0 and inventory.storage_error is None:
        warn_of_capability(store)
    return reports


def _remembered(job: JobDir | None) -> Starts | None:
    """Returns the record of the starts that this node remembers; None where there is none, or it can't be read."""
    with suppress(OSError):
        return None if job is None else read_starts(job)
    return None


def _refuse_differences(arrivals: list[_Arrival]) -> None:
    """Raises BusyError if a rank's place is taken, UsageError if it was given other settings than rank 0."""
    expected = arrivals[0].given
    for rank, arrival in enumerate(arrivals):
        if arrival.busy:
            raise BusyError(arrival.busy)
        for name in arrival.given:
            if arrival.given[name] != expected[name]:
                raise UsageError(f"{name} is {arrival.given[name]!r} on rank {rank} and {expected[name]!r} on rank 0")


def _lacking(job: JobDir, nbytes: int, ranks: int, room: Room) -> str | None:
    """Returns the reason why memory can't hold the snapshots of this node's ``ranks``; None when it can."""
    try:
        return room.describe_shortage(job, nbytes, ranks)
    except OSError as error:  # somebody has removed it
        return f"memory store {job.path.parent}: {describe_error(error)}"
