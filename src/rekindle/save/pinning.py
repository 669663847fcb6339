"""Pins the newest save on storage, though it may still be on its way there."""

from __future__ import annotations

import logging
import time
from contextlib import suppress
from functools import partial

from rekindle.common.os_errors import describe_error
from rekindle.common.timeouts import in_background, with_timeout
from rekindle.errors import MemoryStoreError, NotDurableError
from rekindle.format.lineage import ShardId
from rekindle.save.saver import Saver
from rekindle.storage.pins import pin_if_durable, pin_when_durable

__all__ = ["pin_saved"]

log = logging.getLogger("rekindle")

_PIN = 60.0
"""Seconds that storage gets to pin what it has just taken."""
_LOOK = 3.0
"""Seconds that storage gets to say whether it has a checkpoint."""


def pin_saved(saver: Saver, stamp: ShardId, *, durable: bool, timeout: float) -> None:
    """Pin the save of ``stamp``: now if it is ``durable``, else once it is on storage. Call ``Saver.conclude`` first.

    Raises NotDurableError when that can't be done now, or one that was to be pinned before isn't on storage within
    ``timeout`` seconds.
    """
    store = saver.session.store
    if durable:
        try:
            with saver.pause("waiting for storage"):
                with_timeout(_PIN, store.root, lambda: store.pin(stamp))
        except OSError as error:
            raise NotDurableError(
                f"step {stamp.step} is on storage, but not pinned: {describe_error(error)}"
            ) from error
        return
    _wait_for_earlier(saver, stamp, timeout)
    newest = saver.newest
    if newest is None or not newest.pinned:  # else its receipt says so
        if saver.memory is not None and newest is not None:
            with suppress(MemoryStoreError):  # full memory: the thread below pins it on storage
                saver.memory.persist(newest, pin=True)
        with suppress(OSError, NotDurableError):
            saver.finish_direct()
            if with_timeout(_LOOK, store.root, partial(pin_if_durable, store, stamp)):
                return
    in_background(partial(pin_when_durable, store, stamp), "rekindle-pin")


def _wait_for_earlier(saver: Saver, stamp: ShardId, timeout: float) -> None:
    """Return when the saves to be pinned before ``stamp`` are on storage: memory keeps one such snapshot, not more.

    Done after the save of ``stamp``, which takes no older one's place, so that its state is safe meanwhile.
    """
    if saver.memory is None:
        return
    store, deadline = saver.session.store, time.monotonic() + timeout
    for older in saver.memory.slots.pins_due(stamp):
        try:
            saver.wait_once_durable(older, max(0.0, deadline - time.monotonic()))
        except NotDurableError as error:
            raise NotDurableError(
                f"step {stamp.step} is saved, but will not stay if later saves come before storage has "
                f"step {older.step}, which was pinned before: {error}"
            ) from error
        with saver.pause("waiting for storage"), suppress(OSError):
            if not with_timeout(_LOOK, store.root, partial(store.durable, older)):
                log.warning(
                    "step %d was to be pinned, and has not come to storage: a newer one has taken its place",
                    older.step,
                )
