"""Restores: agrees with all ranks on the newest checkpoint that every one of them can read, and loads it, verified."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rekindle.errors import CorruptError, NotFoundError, UsageError
from rekindle.format.lineage import CheckpointKey, ShardId
from rekindle.memory.job_dir import JobDir
from rekindle.memory.nodes import Nodes
from rekindle.restore.broadcast import readers_together
from rekindle.restore.candidate import Candidate, Verdict, half_loaded
from rekindle.restore.choose import SUPERSEDED, Choice, choose
from rekindle.restore.match import mismatch
from rekindle.restore.options import differences, options_of
from rekindle.restore.partial import keep, refuse_empty
from rekindle.restore.peers import see_peers
from rekindle.session.group import ProcessGroup, SingleProcess
from rekindle.session.inventory import (
    FreshStart,
    Inventory,
    Offer,
    deleted_for_all,
    describe_fresh_start,
    newest_fresh_start,
    newest_stored,
    only_in_deleted_run,
    refuse_less,
    refuse_newer_format,
    refuse_two_runs,
    refuse_unseen,
    take_inventory,
)
from rekindle.storage.store import Store

__all__ = ["Restored", "agree", "restore"]

log = logging.getLogger("rekindle")

_BUILD_ANEW = "the live state is partly overwritten; build it anew, best in a new process"


@dataclass(frozen=True)
class Restored:
    """The result of a restore, on this rank."""

    checkpoint: CheckpointKey
    place: str
    nbytes: int
    read: int
    """Bytes that this rank has read, copies that turned out damaged included; other ranks may have sent some more."""
    seconds: float
    stored: int | None
    """Newest step, this one or one before it, that storage has."""
    back: bool
    """True if it is of a run that was deleted and is back: what memory has of the one begun since counts no more."""

    @property
    def step(self) -> int:
        return self.checkpoint.step


def restore(
    group: SingleProcess | ProcessGroup,
    state: Mapping[str, Any],
    job: JobDir | None,
    store: Store,
    step: int | None,
    *,
    allow_pickle: bool,
    parts: frozenset[str] | None = None,
    nodes: Nodes | None = None,
) -> tuple[Restored | None, int]:
    """Loads the newest readable checkpoint, or that of ``step``. None when there is none to load. A collective.

    ``parts``: entries of the state to load as far as they match, something of each at least; None when all has to.
    ``nodes``: those of the start, whose memory is read too; None where there is one, or they don't know each other.

    Returns the highest generation that any rank sees, too: storage may have been away when the start was given its own.

    Raises CorruptError when checkpoints exist and none is sound, NotFoundError when ``step`` isn't there, or storage
    shows less than it had, StateMismatchError when the checkpoint doesn't match the live state: on all ranks alike.
    """
    if nodes is not None:
        group.barrier()  # ranks of all nodes have put into memory what they can give
    inventories = group.gather(take_inventory(job, store, group.rank))
    if len({inventory.stored for inventory in inventories}) > 1:
        # A step became durable between two ranks' looks; or one of them sees none, and will see none this time either.
        inventories = group.gather(take_inventory(job, store, group.rank))
    if nodes is not None:
        inventories = see_peers(inventories, group.rank, nodes)
    overwritten = any(group.gather(half_loaded(state)))
    generation = max((offer.incarnation.generation for one in inventories for offer in one.offers), default=0)
    if step is None and deleted_for_all([inventory.storage_state for inventory in inventories]):
        if overwritten:
            raise UsageError(f"an earlier restore failed: {_BUILD_ANEW}")
        if group.rank == 0:
            log.warning("%s", describe_fresh_start(store.root))
        return None, generation
    given = group, state, store, step, parts, inventories, nodes
    return _Restore(*given, allow_pickle=allow_pickle, overwritten=overwritten).run(), generation


class _Restore:
    """One restore, once all ranks know what each of them sees. Methods are collectives."""

    def __init__(
        self,
        group: SingleProcess | ProcessGroup,
        state: Mapping[str, Any],
        store: Store,
        step: int | None,
        parts: frozenset[str] | None,
        inventories: list[Inventory],
        nodes: Nodes | None,
        *,
        allow_pickle: bool,
        overwritten: bool,
    ) -> None:
        self._group, self._state, self._store = group, state, store
        self._step, self._allow_pickle, self._parts = step, allow_pickle, parts
        self._inventories, self._ours, self._nodes = inventories, inventories[group.rank], nodes
        self._overwritten = overwritten
        """True if the live state of a rank is neither what it was nor what a checkpoint holds."""
        self._fresh_start = newest_fresh_start(inventories)
        self._choice = choose(_offers(step, inventories, self._fresh_start), step)
        self._worlds = {CheckpointKey(o.step, o.incarnation): o.world for one in inventories for o in one.offers}

    def run(self) -> Restored | None:
        """Loads the first candidate that is sound on all ranks."""
        if self._step is None:
            best = max((key.step for key in self._choice.candidates), default=0)
            refuse_newer_format(best, self._inventories, _on_purpose(best))
        for key in self._choice.candidates:
            if self._step is None:
                refuse_less(key.step, self._inventories, _on_purpose(key.step))
            done = self._try(key)
            if done is not None:
                return done
        _explain_nothing(
            self._group.rank, self._store, self._choice, self._step, self._inventories, overwritten=self._overwritten
        )
        return None

    def _try(self, key: CheckpointKey) -> Restored | None:
        """Loads one candidate; None, and the reason noted in the choice, when a rank has no sound copy of it."""
        group, began = self._group, time.monotonic()
        ranks = (group.rank, group.world)
        copies = self._ours.copies.get(key, [])
        with Candidate(
            self._state, key, copies, ranks, allow_pickle=self._allow_pickle, parts=self._parts
        ) as candidate:
            candidate.open()
            verdicts = agree(group, candidate.verdict)
            _check_match(key.step, verdicts, self._parts)
            if all(verdict.place for verdict in verdicts):
                with readers_together(group, [verdict.far for verdict in verdicts], self._nodes) as together:
                    candidate.fill(together)
                candidate.verdict.seconds = time.monotonic() - began
                verdicts = agree(group, candidate.verdict)
            self._overwritten = self._overwritten or any(verdict.half_loaded for verdict in verdicts)
            _explain(group.rank, self._choice, key, verdicts)
            if not all(verdict.place for verdict in verdicts):
                return None
            self._load(key, candidate, verdicts)
        verdict = candidate.verdict
        done = Restored(
            checkpoint=key,
            place=verdict.place or "",
            nbytes=verdict.nbytes,
            read=verdict.read,
            seconds=time.monotonic() - began,
            stored=newest_stored(self._ours.all_copies, key),
            back=self._fresh_start is not None and key.incarnation.generation < self._fresh_start[0],
        )
        _report(group.rank, done, verdicts, self._inventories)
        if self._step is None and group.rank == 0:
            _warn_of_unseen(key.step, self._inventories)
        return done

    def _load(self, key: CheckpointKey, candidate: Candidate, verdicts: list[Verdict]) -> None:
        """Hands over what all ranks have found to be sound, and warns of what a person should know."""
        group, world = self._group, self._worlds[key]
        _warn_of_resize(group, key.step, world)
        code = options_of(self._state)
        candidate.load()
        if group.rank == 0:
            _warn_of_options(code, options_of(self._state))
        if self._parts is not None:
            _log_table(group.rank, verdicts)
            if group.rank == 0 and set.intersection(*(verdict.unloaded for verdict in verdicts)):
                keep(self._store, ShardId(key.step, 0, world, key.incarnation))


def _offers(step: int | None, inventories: list[Inventory], fresh_start: FreshStart | None) -> list[list[Offer]]:
    """Lists all ranks' offers; those of a run alone that is back, after another one began, if ``step`` is of it.

    Raises NotFoundError, on all ranks, where there are both, and nobody says which one counts.
    """
    offers = [inventory.offers for inventory in inventories]
    if fresh_start is None:
        return offers
    every = [offer for rank in offers for offer in rank]
    if step is None:
        refuse_two_runs(every, fresh_start, _on_purpose)
        return offers
    if not only_in_deleted_run(step, every, fresh_start):
        return offers
    return [[offer for offer in rank if offer.incarnation.generation < fresh_start[0]] for rank in offers]


def _on_purpose(step: int) -> str:
    if not step:
        return "restore(step=0) starts anew on purpose"
    return f"restore(step={step}) goes on from step {step} on purpose"


def agree(group: SingleProcess | ProcessGroup, verdict: Verdict) -> list[Verdict]:
    """Gathers all ranks' verdicts. Raises on all of them what one of them has to raise."""
    verdicts: list[Verdict] = group.gather(verdict)
    for other in verdicts:
        if other.error is not None:
            raise other.error
    return verdicts


def _check_match(step: int, verdicts: list[Verdict], parts: frozenset[str] | None) -> None:
    """Raises StateMismatchError for tensors that no rank has a place for: to load without them would lose them."""
    if not all(verdict.place for verdict in verdicts):
        return
    if parts is not None:
        refuse_empty(step, [verdict.counts for verdict in verdicts], verdicts[0].there, parts)
        return
    nowhere = set.intersection(*(verdict.surplus for verdict in verdicts))
    if nowhere:
        raise mismatch([f"{name}: only in the checkpoint of step {step}" for name in nowhere])


# -- telling ---------------------------------------------------------------------------------------------------------


def _log_table(rank: int, verdicts: list[Verdict]) -> None:
    """Logs one table of what was loaded, and another one from each rank whose table differs."""
    if rank == 0 or verdicts[rank].table != verdicts[0].table:
        log.warning("%s%s", f"rank {rank}: " if len(verdicts) > 1 else "", verdicts[rank].table)


def _warn_of_options(code: Mapping[str, Any], restored: Mapping[str, Any]) -> None:
    changed = differences(code, restored)
    if changed:
        log.warning(
            "options that differ from the code were restored: %s. To go on with those of the code, set them after "
            "restore()",
            changed,
        )


def _warn_of_resize(group: SingleProcess | ProcessGroup, step: int, world: int) -> None:
    if group.rank == 0 and world != group.world:
        log.warning(
            "step %d was saved by %d rank(s) and is read by %d: what each rank has of its own, random generators "
            "included, rank r takes from rank r modulo %d",
            *(step, world, group.world, world),
        )


def _explain(rank: int, choice: Choice, key: CheckpointKey, verdicts: list[Verdict]) -> None:
    """Logs on rank 0 why newer steps, or nearer copies of this one, were skipped; notes why this one fails."""
    reasons = [f"rank {i}: {why}" for i, verdict in enumerate(verdicts) for why in verdict.reasons]
    if rank == 0:
        for other in sorted(choice.rejected, reverse=True):
            if other > key:
                in_order = choice.rejected[other].startswith(SUPERSEDED) and other not in choice.left
                level = logging.INFO if in_order else logging.WARNING
                log.log(level, "restore: %s was skipped: %s", _named(other), choice.rejected[other])
        for why in reasons:
            log.warning("restore: a copy of step %d was skipped: %s", key.step, why)
    choice.rejected = {k: v for k, v in choice.rejected.items() if k < key}
    if not all(verdict.place for verdict in verdicts):
        choice.rejected[key] = "; ".join(reasons)


def _named(key: CheckpointKey) -> str:
    return f"step {key.step} of generation {key.incarnation.generation}"


def _report(rank: int, done: Restored, verdicts: list[Verdict], inventories: list[Inventory]) -> None:
    if rank != 0:
        return
    places = sorted({v.place for v in verdicts if v.place})
    total = sum(v.nbytes for v in verdicts)
    slowest = max(done.seconds, *(v.seconds for v in verdicts))
    log.info(
        "restored step %d from %s: %.1f MB on %d rank(s) in %.3f s, %.2f GB/s, verified",
        *(done.step, " and ".join(places), total / 1e6, len(verdicts), slowest, total / 1e9 / max(slowest, 1e-9)),
    )
    for error in sorted({one.storage_error for one in inventories if one.storage_error}):
        log.warning("restored step %d without storage, which may have a newer one: %s", done.step, error)


def _warn_of_unseen(step: int, inventories: list[Inventory]) -> None:
    """Warns that storage shows nothing at all, though memory has what is as new as anything that was there."""
    noted = max(inventory.noted for inventory in inventories)
    if noted and not any(inventory.stored or inventory.storage_error for inventory in inventories):
        log.warning(
            "step %d was on storage, which shows nothing now: see that it is mounted. Until then, all saves stay in "
            "memory; restore(step=%d) begins anew on storage",
            *(noted, step),
        )


def _explain_nothing(
    rank: int, store: Store, choice: Choice, step: int | None, inventories: list[Inventory], *, overwritten: bool
) -> None:
    """Raises the reason why no candidate was left, unless the root is empty: all else must not pass for that."""
    why = [f"{_named(key)}: {choice.rejected[key]}" for key in sorted(choice.rejected, reverse=True)]
    storage = next((one.storage_error for one in inventories if one.storage_error), None)
    if storage:
        raise NotFoundError(f"nothing to restore in memory, and storage can't be read: {storage}")
    if choice.candidates:
        anew = "restore(step=0) starts anew and supersedes them"
        what_to_do = f"{_BUILD_ANEW}, where {anew}" if overwritten else anew
        raise CorruptError(f"no checkpoint is sound; {what_to_do}. " + "; ".join(why))
    damaged = sorted({path for one in inventories for path in one.damaged})
    if damaged and step != 0:
        raise CorruptError(
            f"no checkpoint can be read: the manifest of {', '.join(damaged)} is damaged, or a link to elsewhere; "
            "restore(step=0) starts anew"
        )
    known = sorted({offer.step for one in inventories for offer in one.offers})
    if step:
        raise NotFoundError(f"no checkpoint of step {step}; {'; '.join(why) or f'there are {known}'}")
    if step is None:
        refuse_unseen(0, inventories, _on_purpose(0))
    if overwritten:
        raise UsageError(f"an earlier restore failed: {_BUILD_ANEW}")
    if rank == 0:
        _log_fresh_start(store, why, known if step == 0 else [])


def _log_fresh_start(store: Store, why: list[str], superseded: list[int]) -> None:
    for line in why:
        log.warning("restore: skipped %s", line)
    if superseded:
        log.warning(
            "starting anew, as told: steps %s are superseded, and removed once this run has a durable checkpoint",
            ", ".join(map(str, superseded)),
        )
        return
    level = logging.WARNING if why else logging.INFO
    log.log(level, "nothing to restore at %s: starting from step 0", store.root)
