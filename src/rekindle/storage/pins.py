"""Pinned checkpoints: those that retention leaves alone until somebody unpins them."""

from __future__ import annotations

import logging
import time

from rekindle.common.os_errors import describe_error
from rekindle.errors import NotFoundError
from rekindle.format.lineage import ShardId
from rekindle.storage.store import Store

__all__ = ["pin_if_there", "pin_step", "pin_when_there", "unpin_step"]

log = logging.getLogger("rekindle")

_COMES_WITHIN = 600.0
"""Seconds that a checkpoint which is to be pinned may take to storage."""


def pin_step(store: Store, step: int) -> None:
    """Pin the youngest checkpoint of ``step``. Raises NotFoundError when storage has none."""
    found = store.find(step)
    if found is None:
        raise NotFoundError(f"{store.root}: no checkpoint of step {step} on storage")
    store.pin(found.stamp)


def unpin_step(store: Store, step: int) -> None:
    """Unpin all checkpoints of ``step``, abandoned ones too. Raises NotFoundError when storage has none."""
    found = [entry for entry in store.published() if entry.stamp.step == step]
    if not found:
        raise NotFoundError(f"{store.root}: no checkpoint of step {step} on storage")
    for entry in found:
        store.unpin(entry.stamp)


def pin_if_there(store: Store, stamp: ShardId) -> bool:
    """Pin a checkpoint if it is on storage by now. True if it is."""
    there = store.durable(stamp)
    if there:
        store.pin(stamp)
    return there


def pin_when_there(store: Store, stamp: ShardId) -> None:
    """Pin a checkpoint that is on its way to storage, or log that it has not come there. For a thread of its own."""
    deadline, why = time.monotonic() + _COMES_WITHIN, "a newer one has taken its place, or storage is slow"
    while time.monotonic() < deadline:
        try:
            if pin_if_there(store, stamp):
                return
        except OSError as error:
            why = describe_error(error)
        time.sleep(store.poll)
    log.warning("step %d was to be pinned, and has not come to storage: %s", stamp.step, why)
