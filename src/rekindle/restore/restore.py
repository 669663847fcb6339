"""Agree with all ranks on the newest checkpoint that every one of them can read, and load it, verified on the way."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from rekindle.errors import CorruptError, NotFoundError, UsageError, VersionError
from rekindle.format.lineage import CheckpointKey, Incarnation, ShardId
from rekindle.memory.job_dir import JobDir
from rekindle.restore.candidate import Candidate, Verdict, half_loaded
from rekindle.restore.choose import Choice, choose
from rekindle.restore.match import mismatch
from rekindle.restore.options import differences, options_of
from rekindle.restore.partial import keep, refuse_empty
from rekindle.session.group import ProcessGroup, SingleProcess
from rekindle.session.inventory import Inventory, Offer, take_inventory
from rekindle.storage.catalog import newest_stored, refuse_behind
from rekindle.storage.checks import FreshStart, deleted_for_all, describe_fresh_start, refuse_unchosen
from rekindle.storage.store import Store

__all__ = ["Restored", "restore"]

log = logging.getLogger("rekindle")


_SPOILT = "the live state is partly overwritten; build it anew, best in a new process"


@dataclass(frozen=True)
class Restored:
    """What a restore did, on this rank."""

    step: int
    incarnation: Incarnation
    place: str
    nbytes: int
    read: int
    """Bytes that this rank has read, copies that turned out damaged included; other ranks may have sent some more."""
    seconds: float
    stored: int | None
    """The newest step, this one or one before it, that storage has."""
    back: bool
    """Whether it is of a run that was deleted and is back: what memory has of the one begun since counts no more."""


def restore(
    group: SingleProcess | ProcessGroup,
    state: Mapping[str, Any],
    job: JobDir | None,
    store: Store,
    step: int | None,
    allow_pickle: bool,
    parts: frozenset[str] | None = None,
) -> tuple[Restored | None, int]:
    """Load the newest readable checkpoint, or that of ``step``. None when there is none to load. A collective.

    ``parts``: entries of the state to load as far as they fit, something of each at least; None when all has to fit.

    Gives the highest generation that any rank sees, too: when the start was given its own one, storage may have been
    away.

    Raises CorruptError when checkpoints exist and none is sound, NotFoundError when ``step`` isn't there,
    StateMismatchError when the chosen one doesn't fit the live state: on all ranks alike.
    """
    sight = take_inventory(job, store, group.rank)
    sight.half_loaded = half_loaded(state)
    sight.anew = job.notes.fresh_start() if job is not None else None
    sights = group.gather(sight)
    if len({s.stored for s in sights}) > 1:  # a step became durable between two ranks' looks, or one of them sees none
        sight = replace(take_inventory(job, store, group.rank), half_loaded=sight.half_loaded, anew=sight.anew)
        sights = group.gather(sight)
    spoilt = any(s.half_loaded for s in sights)
    generation = max((offer.incarnation.generation for s in sights for offer in s.offers), default=0)
    if step is None and deleted_for_all([s.storage for s in sights]):
        if spoilt:
            raise UsageError(f"an earlier restore failed: {_SPOILT}")
        if group.rank == 0:
            log.warning("%s", describe_fresh_start(store.root))
        return None, generation
    anew = max((s.anew for s in sights if s.anew is not None), default=None)
    choice = choose(_of_the_run(step, sights, anew), step)
    if step is None:
        _refuse_newer(choice, sights)
    worlds = {(o.step, o.incarnation): o.world for s in sights for o in s.offers}
    for key in choice.candidates:
        if step is None:
            _refuse_older(key[0], sights)
            instead = f"restore(step={key[0]}) goes on from step {key[0]} on purpose"
            refuse_behind(key[0], (one for s in sights for one in s.unread), instead)
        began = time.monotonic()
        ranks = (group.rank, group.world)
        with Candidate(state, key, sight.copies.get(key, []), ranks, allow_pickle, parts) as attempt:
            attempt.open()
            verdicts = _agree(group, attempt.verdict)
            _check_fit(key[0], verdicts, parts)
            if all(v.place for v in verdicts):
                attempt.fill(group, verdicts)
                attempt.verdict.seconds = time.monotonic() - began
                verdicts = _agree(group, attempt.verdict)
            spoilt = spoilt or any(v.half_loaded for v in verdicts)
            _explain(group.rank, choice, key, verdicts)
            if not all(v.place for v in verdicts):
                continue
            _warn_of_resize(group, key[0], worlds[key])
            code = options_of(state)
            attempt.load()
            if group.rank == 0:
                _tell_options(code, options_of(state))
            if parts is not None:
                _show_rest(group.rank, verdicts)
                if group.rank == 0 and set.intersection(*(verdict.unloaded for verdict in verdicts)):
                    keep(store, ShardId(key[0], 0, worlds[key], key[1]))
        verdict = attempt.verdict
        stored = newest_stored([copy for near in sight.copies.values() for copy in near], key)
        back = anew is not None and key[1].generation < anew[0]
        done = Restored(*key, verdict.place or "", verdict.nbytes, verdict.read, time.monotonic() - began, stored, back)
        _report(group.rank, done, verdicts, sights)
        if step is None and group.rank == 0:
            _warn_of_gone(key[0], sights)
        return done, generation
    _nothing(group.rank, store, choice, step, sights, spoilt)
    return None, generation


def _of_the_run(step: int | None, sights: list[Inventory], anew: FreshStart | None) -> list[list[Offer]]:
    """All ranks' offers. Of a run that is back, though another one has begun since, those alone if ``step`` is of it.

    Raises NotFoundError, on all ranks, where there are both, and nobody says which one counts.
    """
    offers = [sight.offers for sight in sights]
    if anew is None:
        return offers
    if step is None:
        refuse_unchosen(((o.step, o.incarnation.generation, o.places) for rank in offers for o in rank), anew)
        return offers
    if any(o.step == step and o.incarnation.generation >= anew[0] for rank in offers for o in rank):
        return offers
    return [[o for o in rank if o.incarnation.generation < anew[0]] for rank in offers]


def _refuse_newer(choice: Choice, sights: list[Inventory]) -> None:
    """Going back to an older step because this is an older Rekindle is for a person to decide."""
    known = max((key[0] for key in choice.candidates), default=-1)
    newer = [found for sight in sights for found in sight.newer if found[0] > known]
    if newer:
        older = f"; restore(step={known}) goes on from step {known} instead, and leaves it as it is" * (known >= 0)
        raise VersionError(max(newer)[1] + older)


def _refuse_older(step: int, sights: list[Inventory]) -> None:
    """Storage that doesn't show a rank what it had may do so soon: to go on from less would leave all of it behind."""
    had = max(max(sight.noted, sight.stored) for sight in sights)
    blind = [rank for rank, sight in enumerate(sights) if sight.stored < had]
    if step >= had or not blind:
        return
    error = next((sights[rank].storage_error for rank in blind if sights[rank].storage_error), None)
    why = f"which can't be read now ({error})" if error else "which shows nothing of it now"
    if len(blind) < len(sights):
        why += f" on rank {blind[0]}"
    instead = f"goes on from step {step} on purpose, and leaves it behind" if step else "starts anew on purpose"
    raise NotFoundError(f"step {had} was on storage, {why}: see that it is mounted. restore(step={step}) {instead}")


def _agree(group: SingleProcess | ProcessGroup, verdict: Verdict) -> list[Verdict]:
    """All ranks' verdicts. Raises on all of them what one of them has to raise."""
    verdicts: list[Verdict] = group.gather(verdict)
    for other in verdicts:
        if other.error is not None:
            raise other.error
    return verdicts


def _check_fit(step: int, verdicts: list[Verdict], parts: frozenset[str] | None) -> None:
    """What one rank has no place for another one may have; what nobody has is lost, if it is loaded like this."""
    if not all(verdict.place for verdict in verdicts):
        return
    if parts is not None:
        refuse_empty(step, [verdict.counts for verdict in verdicts], verdicts[0].there, parts)
        return
    nowhere = set.intersection(*(verdict.surplus for verdict in verdicts))
    if nowhere:
        raise mismatch([f"{name}: only in the checkpoint of step {step}" for name in nowhere])


def _show_rest(rank: int, verdicts: list[Verdict]) -> None:
    """One table, and another one from each rank that has something else to tell."""
    if rank == 0 or verdicts[rank].table != verdicts[0].table:
        log.warning("%s%s", f"rank {rank}: " if len(verdicts) > 1 else "", verdicts[rank].table)


def _tell_options(code: Mapping[str, Any], restored: Mapping[str, Any]) -> None:
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
    """Say on rank 0 why newer steps, or nearer copies of this one, were passed over; remember why this one fails."""
    reasons = [f"rank {i}: {why}" for i, verdict in enumerate(verdicts) for why in verdict.reasons]
    if rank == 0:
        for other in sorted(choice.rejected, reverse=True):
            if other > key:
                level = logging.INFO if choice.rejected[other].startswith("abandoned") else logging.WARNING
                log.log(level, "restore: step %d of generation %d is out: %s", *_short(other), choice.rejected[other])
        for why in reasons:
            log.warning("restore: step %d: a copy is out: %s", key[0], why)
    choice.rejected = {k: v for k, v in choice.rejected.items() if k < key}
    if not all(verdict.place for verdict in verdicts):
        choice.rejected[key] = "; ".join(reasons)


def _short(key: CheckpointKey) -> tuple[int, int]:
    return key[0], key[1].generation


def _report(rank: int, done: Restored, verdicts: list[Verdict], sights: list[Inventory]) -> None:
    if rank != 0:
        return
    places = sorted({v.place for v in verdicts if v.place})
    total = sum(v.nbytes for v in verdicts)
    slowest = max(done.seconds, *(v.seconds for v in verdicts))
    log.info(
        "restored step %d from %s: %.1f MB on %d rank(s) in %.3f s, %.2f GB/s, verified",
        *(done.step, " and ".join(places), total / 1e6, len(verdicts), slowest, total / 1e9 / max(slowest, 1e-9)),
    )
    for error in sorted({s.storage_error for s in sights if s.storage_error}):
        log.warning("restored step %d without storage, which may have a newer one: %s", done.step, error)


def _warn_of_gone(step: int, sights: list[Inventory]) -> None:
    noted = max(sight.noted for sight in sights)
    if noted and not any(sight.stored or sight.storage_error for sight in sights):
        log.warning(
            "step %d was on storage, which shows nothing now: see that it is mounted. Until then, all saves stay in "
            "memory; restore(step=%d) begins anew on storage",
            *(noted, step),
        )


def _nothing(rank: int, store: Store, choice: Choice, step: int | None, sights: list[Inventory], spoilt: bool) -> None:
    """No candidate was left: an empty root is a fresh start, everything else must not pass for one."""
    why = [f"step {k[0]} of generation {k[1].generation}: {choice.rejected[k]}" for k in sorted(choice.rejected)[::-1]]
    storage = next((s.storage_error for s in sights if s.storage_error), None)
    if storage:
        raise NotFoundError(f"nothing to restore in memory, and storage can't be read: {storage}")
    if choice.candidates:
        anew = "restore(step=0) starts anew and leaves them behind"
        raise CorruptError(
            f"no checkpoint is sound; {f'{_SPOILT}, where {anew}' if spoilt else anew}. " + "; ".join(why)
        )
    damaged = sorted({path for sight in sights for path in sight.damaged})
    if damaged and step != 0:
        raise CorruptError(
            f"no checkpoint can be read: the manifest of {', '.join(damaged)} is damaged, or a link to elsewhere; "
            "restore(step=0) starts anew"
        )
    known = sorted({o.step for s in sights for o in s.offers})
    if step:
        raise NotFoundError(f"no checkpoint of step {step}; {'; '.join(why) or f'there are {known}'}")
    if step is None:
        _refuse_older(0, sights)
    if spoilt:
        raise UsageError(f"an earlier restore failed: {_SPOILT}")
    if rank == 0:
        for line in why:
            log.warning("restore: out: %s", line)
        if step == 0 and known:
            log.warning(
                "starting anew, as told: steps %s are left behind, and removed once this run has a durable checkpoint",
                ", ".join(map(str, known)),
            )
        else:
            log.log(
                logging.WARNING if why else logging.INFO, "nothing to restore at %s: starting from step 0", store.root
            )
