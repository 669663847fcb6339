"""Agree with all ranks on the newest checkpoint that every one of them can read, verify it, and load it."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rekindle.errors import CorruptError, NotFoundError, RekindleError, StateMismatchError, UsageError
from rekindle.recovery.choose import Choice, Offer, choose
from rekindle.recovery.group import Alone, Group
from rekindle.snapshot.documents import Receipt
from rekindle.snapshot.lineage import Incarnation
from rekindle.snapshot.memory import JobDir
from rekindle.snapshot.names import receipt_name
from rekindle.snapshot.shard import OpenShard, read_verified
from rekindle.state.load import check, load
from rekindle.storage.catalog import MEMORY, survey
from rekindle.storage.posix import PosixStore
from rekindle.storage.verify import check_manifest

__all__ = ["Restored", "look", "restore"]

log = logging.getLogger("rekindle")

Key = tuple[int, Incarnation]


@dataclass(frozen=True)
class Restored:
    """What a restore did, on this rank."""

    step: int
    incarnation: Incarnation
    place: str
    nbytes: int
    seconds: float


@dataclass
class Sight:
    """What this rank can see: its offers, and where the shard behind each one is."""

    offers: list[Offer]
    receipts: dict[Key, list[tuple[str, Path]]]
    storage_error: str | None


@dataclass
class Verdict:
    """What came of opening one candidate on one rank. ``reasons`` tell why copies were passed over."""

    place: str | None = None
    nbytes: int = 0
    seconds: float = 0.0
    reasons: list[str] = field(default_factory=list)
    error: RekindleError | None = None
    """Why it must not be loaded though it is sound; raised on all ranks."""


def look(job: JobDir | None, store: PosixStore, rank: int) -> Sight:
    """What this rank could restore from. A rank beyond a smaller world's shards reads those from the start again."""
    error = None
    try:
        copies = survey(job, store)
    except OSError as failure:
        error = f"{store.root}: {failure.strerror or failure}"
        copies = survey(job, None)
    worlds: dict[Key, int] = {}
    receipts: dict[Key, list[tuple[str, Path]]] = {}
    for copy in copies:
        worlds[copy.key] = copy.world
        found = receipts.setdefault(copy.key, [])
        shard = rank % copy.world
        if shard in copy.ranks:
            found.append((copy.place, copy.path / receipt_name(shard, copy.world)))
    offers = [Offer(*key, worlds[key], tuple(place for place, _ in receipts[key])) for key in receipts]
    return Sight(offers, receipts, error)


def restore(
    group: Alone | Group,
    state: Mapping[str, Any],
    job: JobDir | None,
    store: PosixStore,
    step: int | None,
    allow_pickle: bool,
) -> Restored | None:
    """Load the newest readable checkpoint, or that of ``step``. None when there is none to load. A collective.

    Raises CorruptError when checkpoints exist and none is sound, NotFoundError when ``step`` isn't there,
    StateMismatchError when the chosen one doesn't fit the live state: on all ranks alike.
    """
    sight = look(job, store, group.rank)
    sights = group.gather(sight)
    choice = choose([s.offers for s in sights], step)
    worlds = {(o.step, o.incarnation): o.world for s in sights for o in s.offers}
    for key in choice.candidates:
        began = time.monotonic()
        verdict, receipt, shard = _open(state, key, sight.receipts[key], allow_pickle)
        verdict.seconds = time.monotonic() - began
        verdicts = group.gather(verdict)
        _explain(group.rank, choice, key, verdicts)
        for other in verdicts:
            if other.error is not None:
                raise other.error
        if all(v.place for v in verdicts):
            assert receipt is not None and shard is not None and verdict.place is not None
            if group.rank == 0 and worlds[key] != group.world:
                log.warning(
                    "step %d was saved by %d ranks and is read by %d: rank r takes the state, random generators "
                    "included, of rank r modulo %d",
                    *(key[0], worlds[key], group.world, worlds[key]),
                )
            load(state, receipt, shard, allow_pickle)
            done = Restored(*key, verdict.place, receipt.file_bytes, time.monotonic() - began)
            _report(group.rank, done, verdicts)
            return done
    _nothing(group.rank, choice, step, sights)
    return None


def _open(
    state: Mapping[str, Any], key: Key, receipts: list[tuple[str, Path]], allow_pickle: bool
) -> tuple[Verdict, Receipt | None, memoryview | None]:
    """The first sound copy of this rank's shard, memory before storage."""
    verdict = Verdict()
    for place, path in receipts:
        try:
            if place != MEMORY:
                _raise_first(check_manifest(path.parent))
            with OpenShard.open(path, in_memory=place == MEMORY) as opened:
                view, problems = read_verified(opened)
            _raise_first(problems)
            if opened.receipt.stamp.key != key:
                raise CorruptError(f"{path}: belongs to another checkpoint")
            check(state, opened.receipt, allow_pickle)
        except (StateMismatchError, UsageError) as error:
            verdict.error = error
        except (OSError, CorruptError) as error:
            verdict.reasons.append(f"{place}: {error}")
            continue
        verdict.place, verdict.nbytes = place, opened.receipt.file_bytes
        return verdict, opened.receipt, view
    return verdict, None, None


def _raise_first(problems: list[CorruptError]) -> None:
    if problems:
        raise problems[0]


def _explain(rank: int, choice: Choice, key: Key, verdicts: list[Verdict]) -> None:
    """Say on rank 0 why newer steps, or nearer copies of this one, were passed over; remember why this one fails."""
    reasons = [f"rank {i}: {why}" for i, verdict in enumerate(verdicts) for why in verdict.reasons]
    if rank == 0:
        for other in sorted(choice.rejected, reverse=True):
            if other > key:
                log.info("restore: step %d of generation %d is out: %s", *_short(other), choice.rejected[other])
        for why in reasons:
            log.warning("restore: step %d: a copy is out: %s", key[0], why)
    choice.rejected = {k: v for k, v in choice.rejected.items() if k < key}
    if not all(verdict.place for verdict in verdicts):
        choice.rejected[key] = "; ".join(reasons)


def _short(key: Key) -> tuple[int, int]:
    return key[0], key[1].generation


def _report(rank: int, done: Restored, verdicts: list[Verdict]) -> None:
    if rank != 0:
        return
    places = sorted({v.place for v in verdicts if v.place})
    total = sum(v.nbytes for v in verdicts)
    slowest = max(done.seconds, *(v.seconds for v in verdicts))
    log.info(
        "restored step %d from %s: %.1f MB on %d rank(s) in %.3f s, %.2f GB/s, verified",
        *(done.step, " and ".join(places), total / 1e6, len(verdicts), slowest, total / 1e9 / max(slowest, 1e-9)),
    )


def _nothing(rank: int, choice: Choice, step: int | None, sights: list[Sight]) -> None:
    """No candidate was left: an empty root is a fresh start, everything else must not pass for one."""
    why = [f"step {k[0]} of generation {k[1].generation}: {choice.rejected[k]}" for k in sorted(choice.rejected)[::-1]]
    storage = next((s.storage_error for s in sights if s.storage_error), None)
    if storage:
        raise NotFoundError(f"nothing to restore in memory, and storage can't be read: {storage}")
    if choice.candidates:
        raise CorruptError(
            "no checkpoint is sound; restore(step=0) starts anew and leaves them behind. " + "; ".join(why)
        )
    if step:
        known = sorted({o.step for s in sights for o in s.offers})
        raise NotFoundError(f"no checkpoint of step {step}; {'; '.join(why) or f'there are {known}'}")
    if rank == 0:
        for line in why:
            log.warning("restore: out: %s", line)
        log.info("nothing to restore: starting from step 0")
