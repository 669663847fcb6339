"""Notes the metric of a save, by which retention finds the best checkpoint, though it may be durable already."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import SupportsFloat

import torch

from rekindle.common.os_errors import describe_error
from rekindle.common.timeouts import in_background, with_timeout
from rekindle.errors import CorruptError, RekindleError, UsageError
from rekindle.format.lineage import ShardId
from rekindle.format.metric import Metric
from rekindle.save.saver import Saver
from rekindle.storage.store import Store

__all__ = ["measured", "note_metric"]

log = logging.getLogger("rekindle")

_NOTE = 60.0
"""Seconds that storage gets to note a metric beside what it has just taken."""
_COMES_WITHIN = 600.0
"""Seconds that a checkpoint may take until it is on storage, where its metric is noted if it came too late for it."""


def measured(
    metrics: Mapping[str, SupportsFloat] | None, keep_best: tuple[str, str] | None, rank: int
) -> Metric | None:
    """Return what ``keep_best`` asks for of the user's ``metrics``; None without any, and for an infinite value or NaN.

    Raises UsageError for metrics without ``keep_best``, and for those that lack what it names. A tensor on a device is
    waited for. Only those of ``rank`` 0 count, so None on the others.
    """
    if metrics is None:
        return None
    if keep_best is None:
        raise UsageError(
            "metrics are for retention by the best value: make the Checkpointer with keep_best=(NAME, 'min')"
        )
    name, mode = keep_best
    if not isinstance(metrics, Mapping) or name not in metrics:
        raise UsageError(f"metrics is {metrics!r:.200}: must be a dictionary with {name!r}, which keep_best names")
    given = metrics[name]
    try:
        value = float(given.detach() if isinstance(given, torch.Tensor) else given)
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise UsageError(f"metrics[{name!r}] is {given!r:.200}: must be one number") from error
    if not math.isfinite(value):
        log.warning("%s is %s, which makes no step the best one", name, value)
        return None
    return Metric(name, value, mode) if rank == 0 else None


def note_metric(saver: Saver, stamp: ShardId, metric: Metric, *, durable: bool) -> None:
    """Note the metric of a step that was saved without it: in memory, and on storage once that has the step.

    With ``durable`` storage has it, and this waits for the note. Never raises: a metric is no reason to stop training.
    """
    if saver.newest is not None and saver.newest.checkpoint == stamp.checkpoint:
        _note_in_memory(saver, replace(saver.newest, metric=metric))
    store = saver.session.store
    if not durable:
        in_background(partial(_note_once_durable, store, stamp, metric), "rekindle-metric")
        return
    try:
        with saver.pause("waiting for storage"):
            with_timeout(_NOTE, store.root, partial(_note, store, stamp, metric))
    except (OSError, CorruptError) as error:
        _tell(stamp, metric, describe_error(error))


def _note_in_memory(saver: Saver, newest: ShardId) -> None:
    """Note the metric of the newest save in its receipt, which the agent carries to storage."""
    saver.newest = newest
    if saver.memory is not None:
        try:
            saver.memory.persist(newest, metric=newest.metric)
        except (OSError, RekindleError) as error:
            log.debug("the metric of step %d is not in memory: %s", newest.step, describe_error(error))


def _note_once_durable(store: Store, stamp: ShardId, metric: Metric) -> None:
    """Waits for a checkpoint to be on storage, and notes its metric there. For a thread of its own."""
    deadline, why = time.monotonic() + _COMES_WITHIN, "a newer one has taken its place, or storage is slow"
    while time.monotonic() < deadline:
        try:
            if store.durable(stamp):
                _note(store, stamp, metric)
                return
        except (OSError, CorruptError) as error:
            why = describe_error(error)
        time.sleep(store.poll)
    _tell(stamp, metric, why)


def _note(store: Store, stamp: ShardId, metric: Metric) -> None:
    found = store.find(stamp.step, stamp.incarnation)
    if found is None or found.stamp.metric != metric:  # else it came in time to be in the receipt
        store.note_metric(stamp, metric)


def _tell(stamp: ShardId, metric: Metric, why: str) -> None:
    log.warning("%s of step %d is not noted on storage, so keep_best passes it over: %s", metric, stamp.step, why)
