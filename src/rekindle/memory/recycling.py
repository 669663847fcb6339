"""Decides which of a rank's snapshots a save may write over, and which goes first where there is no room for one more.

On several nodes all nodes keep two steps together (``Notes.common``): the newest one that is safe from the loss of any
node, and the one that is being copied. A job that loses a node goes on from the first of them, so it goes last of all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from rekindle.format.lineage import CheckpointKey, ShardId
from rekindle.memory.notes import Marks, Notes

__all__ = ["Keeping", "KeepRule", "keep_copies", "keep_own", "not_durable"]


@dataclass(frozen=True)
class Keeping:
    """Says what is to become of a rank's snapshots while the next one is made."""

    kept: frozenset[CheckpointKey]
    """Checkpoints that a save writes over only where there is no room for one more slot."""
    pending: frozenset[CheckpointKey] = frozenset()
    """Those of them that storage still needs. They go after the others."""
    common: tuple[CheckpointKey, ...] = ()
    """Those of them that the nodes keep together. They go after all others, in this order."""
    most: int = 3
    """Number of slots at most: for one that is kept, one that is read, and one that is written."""
    usual: int = 2
    """Number of slots that stay though a save has no need for them."""
    promised: frozenset[CheckpointKey] = frozenset()
    """Those of them that other nodes count on. Only a dying gasp writes over them, or a save that was long without."""

    def order(self, key: CheckpointKey) -> tuple[int, bool]:
        """Returns a sort key: the checkpoints that go first have the lowest."""
        return self.common.index(key) + 1 if key in self.common else 0, key in self.pending


KeepRule = Callable[[Sequence[ShardId], Sequence[CheckpointKey], str], Keeping]
"""Takes the snapshots of a rank, and those checkpoints that all ranks of its node have, both from the oldest to the
newest, and the id of the start that saves."""


def keep_own(notes: Notes, committed: Sequence[ShardId], complete: Sequence[CheckpointKey], start: str) -> Keeping:
    """Keeps a rank's newest snapshot, the newest that all ranks of the node have, and what storage still needs.

    On several nodes it also keeps what all nodes keep together. That takes one slot more. On a node that was
    found to have no room for that, the safe step goes once storage has one that is no older.
    """
    durable, marks = notes.durable(), notes.marks()
    pending = _pending(committed, durable)
    kept = {*complete[-1:], *(stamp.checkpoint for stamp in (*committed[-1:], *pending))}
    here = marks is not None and marks.common.start == start
    safe = _safe(marks, committed, durable, "" if notes.is_cramped(start) else start)
    copied = _copied(marks, committed, start)
    told = copied if marks is not None and copied is not None and copied.step == marks.common.kept else None
    common = tuple(key for key in (copied, safe) if key is not None)
    return Keeping(
        kept=frozenset(kept.union(common)),
        pending=frozenset(stamp.checkpoint for stamp in pending),
        common=common,
        promised=frozenset(key for key in (told, safe) if key is not None),
        # A snapshot to be pinned may wait for a drain to end, while saves go on.
        most=3 + any(stamp.pinned for stamp in pending) + (not kept.issuperset(common)),
        usual=2 + here + (safe is not None),
    )


def keep_copies(notes: Notes, committed: Sequence[ShardId], complete: Sequence[CheckpointKey], start: str) -> Keeping:
    """Keeps one copy of a rank's snapshots: that of the newest node-safe step, else the newest that all ranks have.

    ``notes`` are the job's. They must tell that a step is safe before the next one is copied.
    """
    safe = _safe(notes.marks(), committed, notes.durable(), start)
    kept = frozenset(complete[-1:] if safe is None else [safe])
    return Keeping(kept, promised=kept)


def not_durable(committed: Iterable[ShardId], durable: int | None) -> list[ShardId]:
    """Returns the snapshots that are to go to storage and aren't there yet. ``durable`` is the newest step there."""
    return [stamp for stamp in committed if stamp.persist and (durable is None or stamp.step > durable)]


def _pending(committed: Sequence[ShardId], durable: int | None) -> list[ShardId]:
    """Returns the newest snapshot that storage still needs, and the oldest that is to be pinned there.

    One to be pinned at a time is enough: a save that pins waits for the one before.
    """
    found = not_durable(committed, durable)
    return found[-1:] + [stamp for stamp in found if stamp.pinned][:1]


def _safe(marks: Marks | None, committed: Sequence[ShardId], durable: int | None, start: str) -> CheckpointKey | None:
    """Returns the newest node-safe checkpoint.

    One that is not of ``start`` counts until there is another, or storage has a step that is no older.
    """
    safe = marks.safe if marks is not None else None
    if safe is None or (safe.start != start and durable is not None and durable >= safe.step):
        return None
    return next((stamp.checkpoint for stamp in committed if (stamp.incarnation.id, stamp.step) == safe), None)


def _copied(marks: Marks | None, committed: Sequence[ShardId], start: str) -> CheckpointKey | None:
    """Returns the checkpoint that the nodes copy now, or will once all of them have it."""
    if marks is None or marks.common.start != start or marks.common.step < 0:
        return None
    found = (stamp for stamp in committed if stamp.incarnation.id == start and stamp.step >= marks.common.step)
    return next((stamp.checkpoint for stamp in found), None)
