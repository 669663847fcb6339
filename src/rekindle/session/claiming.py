"""Claims the root for a start, so that no two starts that went on from one can both write there.

The rule of who may go on stands in ``rekindle.format.claim``, the order of a claim in ``rekindle.storage.claims``.
"""

from __future__ import annotations

import datetime
import logging
import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import NamedTuple

from rekindle.common.os_errors import describe_error
from rekindle.common.timeouts import with_timeout
from rekindle.format.claim import (
    MOST_HOSTS,
    Claim,
    Past,
    Starts,
    describe_conflict,
    is_earlier,
    is_minority,
    may_follow,
)
from rekindle.format.lineage import Incarnation
from rekindle.format.names import Root
from rekindle.memory.job_dir import JobDir
from rekindle.memory.starts import forget_starts, write_starts
from rekindle.session.group import ProcessGroup, SingleProcess
from rekindle.storage.claims import claim_root, newest_claim
from rekindle.storage.store import Store

__all__ = ["Stake", "claim_again", "record_starts", "stake_claim"]

log = logging.getLogger("rekindle")

_ANSWER = 10.0
"""Seconds in which storage must take, or refuse, a claim."""
_PRECEDENCE = 30.0
"""Seconds by which the smaller part of a start lets the larger one go first: that one notices and starts again
meanwhile."""
_LOOK_EVERY = 1.0


class Stake(NamedTuple):
    """The outcome of a start's attempt to claim its root, alike on all ranks."""

    starts: Starts
    refusal: str | None = None
    """Message about the start that goes on already; None when there is none."""


def stake_claim(
    group: SingleProcess | ProcessGroup,
    store: Store,
    job: JobDir | None,
    incarnation: Incarnation,
    nodes: Sequence[str],
    remembered: Sequence[Starts | None],
    *,
    used: bool | None,
) -> Stake:
    """Claims the root for a start that begins as ``incarnation``, or returns why it must not go on. A collective.

    ``nodes`` has the node of each rank, ``remembered`` what the first rank of each remembers, and None of the others.
    ``job`` is this node's memory, on the first rank. ``used``: storage has checkpoints; None where it didn't tell. A
    root that has neither these nor a claim may be a mount that is missing: it is claimed once storage shows what the
    start goes on from, or by the first commit, which looks for that.
    """
    before = remembered[group.rank]
    past = tuple(dict.fromkeys(one for starts in remembered if starts is not None for one in starts.remembered))
    hosts = [node.split()[0] for node in dict.fromkeys(nodes)]
    own = Claim(
        start=incarnation.id,
        generation=incarnation.generation,
        hosts=hosts[:MOST_HOSTS],
        nodes=len(hosts),
        world=group.world,
        # What a start before this one might follow, this one may: its processes ended before it made its claim.
        after=max((one.own.after for one in remembered if one is not None), default=0),
        at=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        launch=_launch(),
    )
    starts = Starts(own, past)
    # First: a claim that is made is remembered, whenever the processes of this start end.
    record_starts(job, replace(starts, settled=False))
    stake = None
    if group.rank == 0:
        with_memory = [one.remembered for one in remembered if one is not None]
        # The other ranks wait for this one meanwhile.
        patience = min(_PRECEDENCE, group.seconds / 2)
        stake = _stake(store, starts, lambda start: sum(_knows(start, one) for one in with_memory), used, patience)
    agreed: Stake = group.gather(stake)[0]
    record_starts(job, agreed.starts if agreed.refusal is None else before)
    return agreed


def claim_again(store: Store, starts: Starts, *, used: bool, on_purpose: bool) -> Starts:
    """Claims the root for a start whose meeting could not: whoever has claimed it, if that is ``on_purpose``.

    Returns its new record. Where storage doesn't take the claim either, the first commit tries to make it.
    """
    past = () if on_purpose else starts.past
    try:
        own, rival = with_timeout(_ANSWER, store.root, lambda: claim_root(store, Starts(starts.own, past), make=used))
    except OSError as error:
        _log_unclaimed(store.root, error)
        return starts
    if rival is not None:
        log.warning("%s", _describe_refusal(store.root, rival, starts.past))
    return Starts(own, () if own.number else starts.past)


def record_starts(job: JobDir | None, starts: Starts | None) -> None:
    """Replaces what this node remembers. ``job`` is None without a memory store."""
    if job is not None:
        with suppress(OSError):  # memory is full or gone: this node will not be known to have taken part
            if starts is None:
                forget_starts(job)
            else:
                write_starts(job, starts)


def _stake(store: Store, starts: Starts, knowing: Callable[[str], int], used: bool | None, patience: float) -> Stake:
    """Claims the root on rank 0. ``knowing`` counts the nodes that remember a start. ``patience``: seconds for which a
    smaller part of one waits."""
    if used is None:
        return Stake(starts)
    try:
        newest = with_timeout(_ANSWER, store.root, lambda: newest_claim(store))
        if newest is not None and is_minority(newest, starts.own, knowing(newest.start)):
            _let_others_go_first(store, newest, knowing(newest.start), patience)
        if newest is not None and not knowing(newest.start) and may_follow(newest, starts.own, starts.past):
            # Somebody's new start, which may only have come to read, beside that one: its first commit makes its claim.
            generation = max(starts.own.generation, newest.generation + 1)
            return Stake(replace(starts, own=replace(starts.own, generation=generation, after=newest.number)))
        own, rival = with_timeout(_ANSWER, store.root, lambda: claim_root(store, starts, make=used))
    except OSError as error:
        _log_unclaimed(store.root, error)
        return Stake(starts)
    if rival is not None:
        # A person who decides to go on all the same has decided for the first commit too, should storage be away then.
        own = replace(own, after=rival.number)
        return Stake(Starts(own, starts.past), _describe_refusal(store.root, rival, starts.past))
    return Stake(Starts(own, () if own.number else starts.past))


def _let_others_go_first(store: Store, newest: Claim, present: int, patience: float) -> None:
    """Waits until another start has claimed the root, or might have."""
    log.warning(
        "%d of the %d nodes of the last start are here: waiting %.0f s, as the others may go on without these",
        *(present, newest.nodes, patience),
    )
    until = time.monotonic() + patience
    while time.monotonic() < until:
        time.sleep(_LOOK_EVERY)
        if with_timeout(_ANSWER, store.root, lambda: newest_claim(store)) != newest:
            return


def _describe_refusal(root: Root, rival: Claim, past: Sequence[Past]) -> str:
    why = f"{root}: {describe_conflict(rival, past)}"
    from_storage = (
        f"to go on from storage, run 'rekindle stop --discard {root}' on the nodes here, which gives up what their "
        "memory has of the job. restore(step=N) goes on from step N on purpose"
    )
    if is_earlier(rival, past):
        return f"{why}. See that no other start of the job runs; then, {from_storage}, which memory may have"
    return (
        f"{why}, of which the nodes here know nothing: two starts would go on from one. End that one first; then start "
        f"the job where it ran, or, {from_storage}"
    )


def _log_unclaimed(root: Root, error: OSError) -> None:
    log.info("%s is not claimed for this start, which the first checkpoint does: %s", root, describe_error(error))


def _knows(start: str, remembered: Sequence[Past]) -> bool:
    return any(one.start == start for one in remembered)


def _launch() -> str:
    """Names what Slurm has launched: a job that is put into the queue again keeps its number, and is counted."""
    job = os.environ.get("SLURM_JOB_ID", "")
    return f"slurm {job[:32]}.{os.environ.get('SLURM_RESTART_COUNT', '0')[:16]}" if job else ""
