"""Loads the weights of a model alone, for use or for the start of another run. Nothing else of a checkpoint is read."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch

from rekindle.common.timeouts import with_timeout
from rekindle.errors import CorruptError, MemoryStoreError, NotFoundError, RekindleError, StateMismatchError, UsageError
from rekindle.format.lineage import CheckpointKey, drop_superseded
from rekindle.format.metric import best_of
from rekindle.format.names import Root
from rekindle.memory.job_dir import JobDir, memory_base
from rekindle.restore.broadcast import readers_together
from rekindle.restore.candidate import Candidate, half_loaded
from rekindle.restore.choose import Choice, check_chosen_step, choose
from rekindle.restore.entry import MODEL, ModelEntry, ModelFiles
from rekindle.restore.restore import agree
from rekindle.session.group import this_group
from rekindle.session.inventory import (
    Inventory,
    deleted_for_all,
    newest_fresh_start,
    refuse_less,
    refuse_two_runs,
    take_inventory,
)
from rekindle.settings import check_bool
from rekindle.state.content import StateContent
from rekindle.storage.catalog import MEMORY, STORAGE
from rekindle.storage.open import open_store
from rekindle.storage.roots import describe_root, root_and_step

__all__ = ["load_model"]

log = logging.getLogger("rekindle")

_BEST = "best"
_TRIES = 5
"""Looks at a run that is live: a newer step may take the place of any other at any moment, in memory and on storage."""
_LOOK = 10.0
"""Seconds that storage gets to say what is at a root without checkpoints."""
_SHOWN = 20
"""Most names of one kind that a message lists."""


def load_model(
    root: str | os.PathLike[str],
    model: torch.nn.Module,
    step: int | Literal["best"] | None = None,
    *,
    entry: str | None = None,
    strict: bool = True,
) -> int:
    """Load the weights of ``model`` from the newest checkpoint of ``root``, or that of ``step``. Returns its step.

    Optimizers, schedulers and random generators are neither read nor changed, and nothing is written: the run may be
    over, be another one's, or be training. This node's memory is read first. The model may be wrapped and sharded
    otherwise than it was saved, by any number of ranks. Its tensors keep their dtype, device and sharding. With a
    process group, a collective.

    root
        The root of a run, or the directory of one of its steps.
    step
        A step's number; "best" for the best one by the metric of ``keep_best``; None for the newest.
    entry
        The model's name in the ``state`` of the run. None finds the entry with the model's weights.
    strict
        Raise for weights that only the model or only the checkpoint has. False leaves those as they are, and warns.

    Raises NotFoundError where there is no such checkpoint or model, StateMismatchError where the weights don't fit,
    named as by ``Module.load_state_dict``, CorruptError where no copy is sound.
    """
    if not isinstance(model, torch.nn.Module):
        raise UsageError(f"model is {model!r:.200}: must be a torch.nn.Module")
    where, named = root_and_step(root)
    if isinstance(step, str) and step != _BEST:
        raise UsageError(f"load_model(step={step!r}): must be a number, {_BEST!r}, or None for the newest checkpoint")
    wanted = step if isinstance(step, str) else check_chosen_step(step, "load_model")
    if named is not None:
        if wanted not in (None, named):
            raise UsageError(f"{root} is the directory of step {named}, and step={step!r} asks for another one")
        wanted = named
    return _Loading(where, model, wanted, entry, strict=check_bool("strict", strict)).run()


@dataclass
class _Fit:
    """Names of one rank's model and of the checkpoint, as far as they differ."""

    problem: RekindleError | None = None
    """Reason why no model was found."""
    missing: set[str] = field(default_factory=set)
    """Names that only the model has."""
    unexpected: set[str] = field(default_factory=set)
    """Names that only the checkpoint has."""
    misshaped: set[str] = field(default_factory=set)
    """Sentences about tensors of another shape, or of a dtype that can't be cast."""
    loaded: int = 0
    """Number of names in both."""


class _Loading:
    """One call of ``load_model``. All methods are collectives."""

    def __init__(
        self,
        root: Root,
        model: torch.nn.Module,
        step: int | str | None,
        entry: str | None,
        *,
        strict: bool,
    ) -> None:
        self._root, self._model, self._step = root, model, step
        self._entry, self._strict = entry, strict
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if tensor.is_meta:
                raise UsageError(f"{name} of the model is on the meta device: call model.to_empty(device=...) first")
        self._names = frozenset(StateContent({MODEL: model}).of(model))
        self._group = this_group()
        self._reasons: list[str] = []
        """Reasons why checkpoints were passed over."""

    def run(self) -> int:
        """Loads the newest checkpoint that is sound on all ranks, of those that were asked for. Returns its step."""
        tried: list[CheckpointKey] | None = None
        for _ in range(_TRIES):
            inventories = self._look()
            choice = self._choose(inventories)
            if choice.candidates == tried and not any(_in_memory(inventory) for inventory in inventories):
                break  # else what failed may have been a step that the run had just removed, or not yet completed
            tried, self._reasons = choice.candidates, []
            for key in choice.candidates:
                if self._step is None:
                    refuse_less(key.step, inventories, _named(key.step))
                if self._load(key, inventories[self._group.rank]):
                    return key.step
        raise self._nothing(choice, inventories)

    def _look(self) -> list[Inventory]:
        job = self._memory()
        store = open_store(self._root)
        inventories = self._group.gather(take_inventory(job, store, self._group.rank))
        if len({inventory.stored for inventory in inventories}) > 1:  # a step became durable between two ranks' looks
            inventories = self._group.gather(take_inventory(job, store, self._group.rank))
        return inventories

    def _memory(self) -> JobDir | None:
        """Returns the run's memory on this node; None where somebody else may have made it."""
        job = JobDir.of(self._root, memory_base())
        try:
            job.check()
        except MemoryStoreError as error:
            log.warning("memory is not read: %s", error)
            return None
        return job

    def _choose(self, inventories: list[Inventory]) -> Choice:
        """Orders the checkpoints that were asked for. One that is named may be superseded."""
        offers = [inventory.offers for inventory in inventories]
        if self._step is None:
            if deleted_for_all([inventory.storage_state for inventory in inventories]):
                raise NotFoundError(f"{self._root}: its checkpoints were deleted; {_named(None)} what memory still has")
            fresh_start = newest_fresh_start(inventories)
            if fresh_start is not None:
                refuse_two_runs([offer for rank in offers for offer in rank], fresh_start, _named)
            return choose(offers)
        step = self._best(inventories) if isinstance(self._step, str) else self._step
        return choose([[offer for offer in rank if offer.step == step] for rank in offers])

    def _best(self, inventories: list[Inventory]) -> int:
        best = best_of(drop_superseded([copy for one in inventories for copy in one.all_copies]))
        if best is None:
            raise NotFoundError(f"{self._root}: no checkpoint has a metric, by which one could be the best")
        return best.step

    # -- one checkpoint -----------------------------------------------------------------------------------------

    def _load(self, key: CheckpointKey, ours: Inventory) -> bool:
        """Loads one checkpoint. False, with the reasons noted, where a rank has no sound copy of it."""
        group, began = self._group, time.monotonic()
        entry = ModelEntry(self._entry, self._names)
        copies = [replace(copy, files=ModelFiles(copy.files, entry)) for copy in ours.copies.get(key, [])]
        ranks, parts = (group.rank, group.world), frozenset([MODEL])
        with Candidate(
            {MODEL: self._model}, key, copies, ranks, allow_pickle=False, parts=parts, casts=True
        ) as candidate:
            candidate.open()
            fit = self._compare(candidate, entry)
            verdicts = agree(group, candidate.verdict)
            fits: list[_Fit] = group.gather(fit)
            if all(verdict.place for verdict in verdicts):
                self._refuse(key.step, fits)
                with readers_together(group, [verdict.far for verdict in verdicts], None) as together:
                    candidate.fill(together)
                verdicts = agree(group, candidate.verdict)
            if not all(verdict.place for verdict in verdicts):
                self._pass_over(key, ours, [why for verdict in verdicts for why in verdict.reasons])
                return False
            candidate.load()
        if group.rank == 0:
            places = sorted({verdict.place for verdict in verdicts if verdict.place})
            total, seconds = sum(verdict.nbytes for verdict in verdicts), time.monotonic() - began
            log.info(
                "loaded %s of step %d from %s: %.1f MB on %d rank(s) in %.3f s, verified",
                *(entry.path, key.step, " and ".join(places), total / 1e6, group.world, seconds),
            )
            _warn_of_rest(key.step, *_rest(fits))
        return True

    def _pass_over(self, key: CheckpointKey, ours: Inventory, why: list[str]) -> None:
        """Notes why a checkpoint can't be loaded. One that is in memory alone may only be incomplete still."""
        self._reasons += [f"step {key.step}: {reason}" for reason in why]
        durable = any(copy.place == STORAGE for copy in ours.copies.get(key, []))
        if self._group.rank == 0:
            log.log(logging.WARNING if durable else logging.INFO, "step %d was skipped: %s", key.step, "; ".join(why))

    def _compare(self, candidate: Candidate, entry: ModelEntry) -> _Fit:
        """Compares the names of the model with those of a candidate that has been opened."""
        verdict = candidate.verdict
        if verdict.place is None or verdict.error is not None:
            return _Fit()
        if entry.problem is not None:
            return _Fit(entry.problem)
        match = candidate.match
        if match.lacking and candidate.unseen:
            verdict.place = None
            verdict.reasons.append(f"{match.lacking[0]} may be in the shards of rank(s) {candidate.unseen}")
        return _Fit(
            missing=_bare(match.lacking),
            unexpected=_bare(match.surplus),
            misshaped=_bare(match.problems),
            loaded=match.counts[MODEL][0],
        )

    def _refuse(self, step: int, fits: Sequence[_Fit]) -> None:
        """Raises what is wrong with a checkpoint that can be read, on all ranks alike."""
        for fit in fits:
            if fit.problem is not None:
                raise type(fit.problem)(f"step {step} of {self._root}: {fit.problem}")
        missing, unexpected = _rest(fits)
        misshaped = set().union(*(fit.misshaped for fit in fits))
        nothing = not any(fit.loaded for fit in fits)
        if not misshaped and not nothing and not (self._strict and (missing or unexpected)):
            return
        lines = [f"step {step} does not fit {type(self._model).__name__}:"]
        if missing and (self._strict or nothing):
            lines.append(f"Missing key(s) in state_dict: {_listed(missing)}.")
        if unexpected and (self._strict or nothing):
            lines.append(f"Unexpected key(s) in state_dict: {_listed(unexpected)}.")
        lines += [f"size mismatch for {problem}." for problem in sorted(misshaped)[:_SHOWN]]
        raise StateMismatchError("\n\t".join(lines))

    def _nothing(self, choice: Choice, inventories: list[Inventory]) -> RekindleError:
        """Returns the reason why nothing was loaded."""
        what = "checkpoint" if self._step is None else f"checkpoint of step {self._step}"
        if choice.candidates:
            state = "; the model is partly overwritten" if half_loaded({MODEL: self._model}) else ""
            return CorruptError(f"{self._root}: no {what} can be read{state}: {'; '.join(self._reasons)}")
        trouble = next((one.storage_error for one in inventories if one.storage_error), None)
        if trouble is not None:
            return NotFoundError(f"{self._root}: no {what} in this node's memory, and storage can't be read: {trouble}")
        damaged = sorted({path for one in inventories for path in one.damaged})
        if damaged and self._step is None:
            return CorruptError(f"{self._root}: the manifest of {', '.join(damaged)} is damaged")
        why = "; ".join(f"step {key.step}: {reason}" for key, reason in choice.rejected.items())
        steps = sorted({offer.step for one in inventories for offer in one.offers})
        if not why and steps:
            why = f"it has {', '.join(map(str, steps[-_SHOWN:]))}"
        if not why:
            why = with_timeout(_LOOK, self._root, lambda: describe_root(self._root)) or "nothing is there"
        return NotFoundError(f"{self._root}: no {what}: {why}")


def _in_memory(inventory: Inventory) -> bool:
    return any(copy.place == MEMORY for copy in inventory.all_copies)


def _named(step: int | None) -> str:
    """Tells how to load a step that is not to be had without naming it."""
    return f"load_model(..., step={'N' if step is None else step}) loads {'' if step is None else 'that step'}".strip()


def _bare(names: Iterable[str]) -> set[str]:
    return {name.removeprefix(f"{MODEL}.") for name in names}


def _rest(fits: Sequence[_Fit]) -> tuple[set[str], set[str]]:
    """Returns the names that a rank's model alone has, and those that no rank's model has."""
    missing = set[str]().union(*(fit.missing for fit in fits))
    return missing, set.intersection(*(fit.unexpected for fit in fits))


def _listed(names: Iterable[str]) -> str:
    """Lists names as torch does."""
    every = sorted(names)
    more = f" and {len(every) - _SHOWN} more" if len(every) > _SHOWN else ""
    return ", ".join(f'"{name}"' for name in every[:_SHOWN]) + more


def _warn_of_rest(step: int, missing: set[str], unexpected: set[str]) -> None:
    if missing:
        log.warning(
            "step %d lacks %d weights of the model, left as they were: %s", step, len(missing), _listed(missing)
        )
    if unexpected:
        log.warning(
            "the model has no place for %d of step %d's weights: %s", len(unexpected), step, _listed(unexpected)
        )
