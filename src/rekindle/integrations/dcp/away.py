"""Storage that doesn't show, when a job starts again, what this node knows to have been there."""

from __future__ import annotations

from contextlib import suppress

from rekindle.errors import NotFoundError
from rekindle.format.names import Root
from rekindle.memory.job_dir import JobDir
from rekindle.storage.checks import checkpoints_deleted
from rekindle.storage.open import open_store
from rekindle.storage.store import Contents

__all__ = ["gone", "on_purpose", "out_of_sight", "refuse_deleted"]


def out_of_sight(job: JobDir, contents: Contents | None) -> int:
    """The newest step that this node knows to have been on storage, if that shows nothing so new now; else 0.

    ``contents`` is what storage has shown; None where it can't be listed.
    """
    noted = job.notes.durable() or 0
    shown: list[int] = []
    if contents is not None:
        shown = [entry.stamp.step for entry in contents.published] + [step for step, _ in contents.damaged]
    return noted if max(shown, default=0) < noted else 0


def refuse_deleted(root: Root, job: JobDir) -> None:
    """Raise NotFoundError where all that storage had was deleted: what memory still has of it is not the newest one."""
    deleted = False
    with suppress(OSError):  # storage that doesn't say has not shown that it was
        deleted = checkpoints_deleted(open_store(root), job.notes.durable(), job.notes.root_identity())
    if deleted:
        steps = sorted({stamp.step for stamp, _ in job.snapshots.shard_ids()})
        rest = f"; memory still has steps {steps}, to be loaded by checkpoint_id" if steps else ""
        raise NotFoundError(f"the checkpoints in {root} were deleted{rest}")


def gone(root: Root, noted: int, step: int) -> str:
    """What to say where that is so, and the newest that there is otherwise is ``step``, or nothing.

    Storage may be back soon: to go on from less would leave all of it behind, and what is written there now is lost.
    """
    return (
        f"step {noted} was on storage, and {root} shows nothing of it now: see that it is mounted; {on_purpose(step)}"
    )


def on_purpose(step: int) -> str:
    """What else there is to do, but to see to storage."""
    less = f"to go on from step {step} on purpose, load it by checkpoint_id={step}; " if step else ""
    return f"{less}to begin anew, use a new root"
