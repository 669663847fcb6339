"""Tells what is safe where when a run ends without waiting for storage."""

from __future__ import annotations

import atexit
import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import partial
from weakref import WeakSet

from rekindle.common.os_errors import describe_error
from rekindle.common.timeouts import with_timeout
from rekindle.memory.job_dir import JobDir
from rekindle.save.saver import Saves
from rekindle.storage.catalog import list_checkpoints
from rekindle.storage.store import Store

__all__ = ["Leaving", "tell_copies"]

log = logging.getLogger("rekindle")

_LOOK = 3.0
"""Seconds that storage gets to say what it has: whoever is leaving must not be kept."""


def tell_copies(
    error: BaseException, job: JobDir | None, store: Store, local_ranks: Collection[int], saves: Saves
) -> None:
    """Log what is safe where, of a run that ``error`` ends."""
    copies = _describe(job, store, local_ranks, saves.reached, saves.direct.writing)
    log.warning("left by %s, without waiting for storage: %s", type(error).__name__, copies)


def _describe(job: JobDir | None, store: Store, local_ranks: Collection[int], reached: int, writing: bool) -> str:
    """The newest checkpoint in memory and the newest on storage, and what becomes of them, in one line.

    ``reached`` is the newest step that was told, ``writing`` says whether this process is writing to storage.
    """
    unknown = ""
    try:
        found = with_timeout(_LOOK, store.root, partial(list_checkpoints, job, store, local_ranks))
    except (OSError, RuntimeError) as error:  # from Python 3.12 on an interpreter that is about to end has no threads
        found, unknown = list_checkpoints(job, None, local_ranks), f"storage can't be read now: {describe_error(error)}"
    newest = max((one.step for one in found), default=None)
    durable = max((one.step for one in found if one.durable), default=None)
    parts = [] if newest is None or newest == durable else [_in_memory(newest, job)]
    if durable is not None:
        parts.append(f"step {durable} is on storage")
    elif writing:
        parts.append("this process is still writing to storage, and waits for that at its end")
    else:
        parts.append(unknown or "nothing is on storage")
    if newest is not None and reached > newest:
        parts.append(f"what came after step {newest} is not saved")
    return "; ".join(parts)


def _in_memory(step: int, job: JobDir | None) -> str:
    agent = job is not None and job.agent() is not None
    then = "the agent carries it to storage" if agent else "the next start on this node finds it there"
    return f"step {step} is in this node's memory, and {then}"


@dataclass(eq=False)
class Leaving:
    """Says what is safe where when the process ends without ``close()``: by Ctrl-C for one, or for want of a call.

    One rank of each node says it, if it has made a step; nobody does once ``said`` is set, or this object is gone.
    """

    saves: Saves
    store: Store
    job: JobDir | None
    local_ranks: Sequence[int]
    """Ranks on this node."""
    rank: int
    said: bool = False

    def __post_init__(self) -> None:
        atexit.unregister(_at_exit)  # once is enough
        atexit.register(_at_exit)
        _open.add(self)

    def at_exit(self) -> None:
        """The process is ending."""
        saves = self.saves
        if not self.said and not saves.forked and self.rank == self.local_ranks[0] and saves.reached > saves.restored:
            saves.see_out(0.0)
            copies = _describe(self.job, self.store, self.local_ranks, saves.reached, saves.direct.writing)
            log.warning("ended without close(): %s", copies)


_open: WeakSet[Leaving] = WeakSet()


def _at_exit() -> None:
    for leaving in list(_open):
        leaving.at_exit()
