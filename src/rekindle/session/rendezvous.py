"""How a start of a job begins: the ranks meet, and agree on who they are and what they have."""

from __future__ import annotations

import gc
import logging
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from rekindle.common.os_errors import describe_error
from rekindle.errors import BusyError, MemoryStoreError, UsageError
from rekindle.format.lineage import Incarnation
from rekindle.format.names import Root
from rekindle.memory.job_dir import JobDir
from rekindle.memory.lock import Lock
from rekindle.memory.room import Room
from rekindle.session.group import ProcessGroup, SingleProcess, node_id
from rekindle.session.inventory import take_inventory
from rekindle.session.root import Probe, judge, refusal, warn_of_weakness
from rekindle.session.takeover import make_way
from rekindle.storage.checks import deleted_for_all, root_identity
from rekindle.storage.open import open_store
from rekindle.storage.store import Store

__all__ = ["Meeting", "meet", "take_place"]

log = logging.getLogger("rekindle")

_SOON, _DYING = 2.0, 30.0
"""Seconds that a restarted rank waits for its dying predecessor, without and with a word of that."""


@dataclass
class Meeting:
    """What the ranks agreed on."""

    incarnation: Incarnation
    local_ranks: list[int]
    """Ranks on this node, in order."""
    nodes: int
    lock: Lock | None
    """Makes this process the rank's only trainer; None where even the job's directory can't be had."""
    no_memory: str | None
    """Why snapshots can't go into this node's memory; None when they can. What is there can be read if ``lock`` is."""
    found: bool
    """Whether any rank sees a checkpoint of an earlier start, or a note of one, or can't look."""
    deleted: bool
    """Whether all that an earlier start had on storage was deleted: what memory still has of it counts no more."""
    nbytes: int
    """What a snapshot of this rank will take."""

    def go_on(self, job: JobDir | None, store: Store, rank: int, stored: int | None, anyway: bool) -> None:
        """It is settled what this start goes on from, and that storage has ``stored`` of it: note that.

        Not before: a start that storage is away for has to leave the old note to the next one. It stays as well where
        storage shows nothing, unless that start is to go on ``anyway``.
        """
        if job is None or rank != self.local_ranks[0]:
            return
        with suppress(OSError):
            if stored is not None:
                job.notes.write_durable(stored, root_identity(store, stored))
            elif anyway:
                job.notes.forget_durable()

    def note_anew(
        self, job: JobDir | None, rank: int, ours: Incarnation, base: Incarnation | None, *, back: bool, chosen: bool
    ) -> None:
        """Note that the start ``ours`` begins anew only because all was deleted; or which run was ``chosen`` since.

        ``base`` is the incarnation that it goes on from, and is ``back`` if that was deleted, and is there again.
        """
        if job is None or rank != self.local_ranks[0]:
            return
        with suppress(OSError):
            anew = job.notes.fresh_start()
            if base is None and not chosen and self.deleted:
                job.notes.write_fresh_start(ours.generation)
            elif anew is not None and (chosen or base is None or back):
                counts = ours if base is None or back else base
                job.notes.write_fresh_start(anew[0], counts.generation)


def meet(
    group: SingleProcess | ProcessGroup,
    job: JobDir,
    root: Root,
    size: Callable[[list[int]], int],
    room: Room,
    settings: dict[str, Any],
) -> Meeting:
    """Some rounds with all ranks. A collective.

    ``size``, a collective too, is told the ranks of this node and tells what a snapshot of this one will take;
    ``room`` is what all may take on a node, ``settings`` what every rank must have been given alike.

    Raises BusyError or UsageError, on all ranks: also where the root can't be written to, or nodes don't see the same
    one, unless memory has something to go on from.
    """
    lock, busy, no_memory = take_place(job, group.rank)
    try:
        place = node_id(job.path.parent.parent)
        first = group.gather((place, busy, {"root": str(root), **settings}))
        local_ranks = [rank for rank, (node, _, _) in enumerate(first) if node == place]
        for rank, (_, problem, given) in enumerate(first):
            if problem:
                raise BusyError(problem)
            differing = [name for name in given if given[name] != first[0][2][name]]
            if differing:
                name = differing[0]
                raise UsageError(f"{name} is {given[name]!r} on rank {rank} and {first[0][2][name]!r} on rank 0")
        nbytes = size(local_ranks)
        no_memory = no_memory or _lacking(job, nbytes, len(local_ranks), room)
        store = open_store(root)
        with Probe(group, store, [node for node, _, _ in first]) as probe:
            sight = take_inventory(None if lock is None else job, store, group.rank)
            problem = (refusal(store, sight) if group.rank == local_ranks[0] else None) or probe.problem()
            generation = max((offer.incarnation.generation for offer in sight.offers), default=0)
            begun = Incarnation.begin(0).id
            second = group.gather((no_memory, generation, sight.anything, begun, sight.storage, problem, sight.kept))
        restart = any(entry[6] for entry in second)
        judge([entry[5] for entry in second], restart=restart, rank=group.rank)
    except BaseException:
        if lock is not None:
            lock.release()
        raise
    no_memory = next((second[rank][0] for rank in local_ranks if second[rank][0]), None)
    if group.rank == 0 and sight.storage_error is None:
        warn_of_weakness(store)
    if no_memory is None and group.rank == local_ranks[0]:
        with suppress(OSError):
            log.info("%s", room.told(job, nbytes, len(local_ranks)))
    incarnation = Incarnation(1 + max(entry[1] for entry in second), second[0][3])
    nodes = len({node for node, _, _ in first})
    deleted = deleted_for_all([entry[4] for entry in second])
    found = not deleted and any(entry[2] for entry in second)
    return Meeting(incarnation, local_ranks, nodes, lock, no_memory, found, deleted, nbytes)


def take_place(job: JobDir, rank: int, *, dying: bool = True) -> tuple[Lock | None, str | None, str | None]:
    """(lock, who else has it, why there is no memory): errors are told to all ranks before anybody raises.

    ``dying``: whether it may be this rank's predecessor that has it, and takes its time to end.
    """
    refusal = make_way(job.path, rank)
    if refusal is not None:
        return None, refusal, None
    try:
        try:
            if Lock.holder(job.paths.rank_lock(rank)) == os.getpid():
                gc.collect()  # nobody but garbage may be left of it, such as what a traceback held
            return job.lock_rank(rank, _SOON), None, None
        except BusyError as error:
            if Lock.holder(job.paths.rank_lock(rank)) == os.getpid():
                what = f"process {os.getpid()}, which is this one, trains rank {rank} of this root already"
                return None, f"{what}: call close() there first", None
            if not dying:
                raise
            log.warning("%s; waiting %.0f s for it to end", error, _DYING)
            return job.lock_rank(rank, _DYING), None, None
    except BusyError as error:
        return None, f"{error}: end it, or give this job a root of its own", None
    except MemoryStoreError as error:
        return None, None, str(error)
    except OSError as error:
        return None, None, f"memory store {job.path}: {describe_error(error)}"


def _lacking(job: JobDir, nbytes: int, ranks: int, room: Room) -> str | None:
    try:
        return room.lacking(job, nbytes, ranks)
    except OSError as error:  # somebody has removed it
        return f"memory store {job.path.parent}: {describe_error(error)}"
