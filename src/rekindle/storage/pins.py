"""Pins checkpoints, so that retention keeps them until somebody unpins them."""

from __future__ import annotations

import logging
import time

from rekindle.common.os_errors import describe_error
from rekindle.errors import NotFoundError
from rekindle.format.lineage import ShardId
from rekindle.storage.store import Store

__all__ = ["pin_if_durable", "pin_step", "pin_when_durable", "unpin_step"]

log = logging.getLogger("rekindle")

_COMES_WITHIN = 600.0
"""Seconds that a checkpoint which is to be pinned may take until it is on storage."""


def pin_step(store: Store, step: int) -> None:
    """Pins the youngest checkpoint of ``step``. Raises NotFoundError when storage has none."""
    found = store.find(step)
    if found is None:
        raise NotFoundError(f"{store.root}: no checkpoint of step {step} on storage")
    store.pin(found.stamp)


def unpin_step(store: Store, step: int) -> None:
    """Unpins all checkpoints of ``step``, superseded ones too. Raises NotFoundError when storage has none."""
    found = [entry for entry in store.published() if entry.stamp.step == step]
    if not found:
        raise NotFoundError(f"{store.root}: no checkpoint of step {step} on storage")
    for entry in found:
        store.unpin(entry.stamp)


def pin_if_durable(store: Store, stamp: ShardId) -> bool:
    """Pins a checkpoint if it is on storage by now. True if it is."""
    there = store.durable(stamp)
    if there:
        store.pin(stamp)
    return there


def pin_when_durable(store: Store, stamp: ShardId) -> None:
    """Waits for a checkpoint to be on storage, and pins it, or logs that it has not come. For a thread of its own."""
    deadline, why = time.monotonic() + _COMES_WITHIN, "a newer one has taken its place, or storage is slow"
    while time.monotonic() < deadline:
        try:
            if pin_if_durable(store, stamp):
                return
        except OSError as error:
            why = describe_error(error)
        time.sleep(store.poll)
    log.warning("step %d is not pinned, for it did not reach storage in %.0f s: %s", stamp.step, _COMES_WITHIN, why)
