"""Checkpoints that were deleted and are back, when the job has begun anew since: nobody has said which run counts."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress

from rekindle.errors import NotFoundError
from rekindle.memory.job_dir import JobDir
from rekindle.storage.catalog import STORAGE
from rekindle.storage.store import Store

__all__ = ["Anew", "prune_chosen", "refuse_unchosen"]

Anew = tuple[int, int]
"""See ``Notes.write_fresh_start``."""


def refuse_unchosen(seen: Iterable[tuple[int, int, Iterable[str]]], anew: Anew) -> None:
    """Raise NotFoundError where storage shows a run that was deleted, and another one that began since is there, too.

    ``seen`` has step, generation and places of what all ranks can see.
    """
    since, until = anew
    seen = list(seen)
    back = [step for step, generation, places in seen if generation < since and STORAGE in places]
    begun = [step for step, generation, _ in seen if since <= generation < until]
    if back and begun and not any(generation >= until for _, generation, _ in seen):
        raise NotFoundError(
            f"step {max(back)} is on storage again, which showed nothing when the job began anew and came to step "
            f"{max(begun)}: say which of the two runs counts. restore(step={max(back)}) goes on from the one that is "
            f"back, restore(step={max(begun)}) from the one that was begun anew; the other is left behind"
        )


def prune_chosen(store: Store, job: JobDir | None, generation: int, keep: int | None, every: int | None) -> list[int]:
    """As ``Store.prune``, once a checkpoint of ``generation`` is durable; nothing while somebody has yet to choose."""
    anew = job.notes.fresh_start() if job is not None else None
    if job is not None and anew is not None:
        if generation >= anew[1]:
            with suppress(OSError):  # memory is gone, and the note with it
                job.notes.forget_fresh_start()
        elif any(entry.stamp.incarnation.generation < anew[0] for entry in store.published()):
            return []
    return store.prune(keep, every)
