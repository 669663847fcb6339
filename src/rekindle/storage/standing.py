"""What stands on storage, as whoever writes there must see it: it is mounted, and nobody else writes there."""

from __future__ import annotations

import errno
from collections.abc import Iterable, Sequence

from rekindle.snapshot.lineage import Incarnation, Stamp, elsewhere, live
from rekindle.snapshot.names import Root
from rekindle.storage.contract import Store

__all__ = ["check_written", "newest_on", "refuse_elsewhere", "rival"]


def newest_on(store: Store, noted: int | None, starts: Iterable[Incarnation] = ()) -> Stamp | None:
    """The newest checkpoint that no start of the job has left behind; ``starts`` are known from elsewhere.

    Raises FileNotFoundError where step ``noted`` was and nothing is now: so looks what lies below a mount point, and
    what is written there is lost by the next mount. To be asked before the first byte is written, and again before it
    is said to be durable: a mount may go in between.
    """
    published = store.published() or store.published()  # the only one may just be getting its name
    if not published and noted is not None and not store.damaged():
        raise FileNotFoundError(errno.ENOENT, f"step {noted} was there, and nothing is now", str(store.root))
    return next(reversed(live([entry.stamp for entry in published], starts)), None)


def rival(root: Root, newest: Stamp, ours: str) -> str:
    """What to tell of another start that writes to ``root``; ``ours`` says what becomes of this one's checkpoints."""
    return (
        f"{root}: another start of this job, generation {newest.incarnation.generation}, writes there; {ours}: "
        "end one of the two, and give each job a root of its own"
    )


def check_written(store: Store, parts: Sequence[Stamp]) -> None:
    """Raise FileNotFoundError where parts of a step that have been written are gone, and not because it is durable."""
    if not all(store.has_shard(stamp) for stamp in parts) and not store.durable(parts[0]):
        raise FileNotFoundError(errno.ENOENT, f"what was written of step {parts[0].step} is gone", str(store.root))


def refuse_elsewhere(store: Store, stamp: Stamp, noted: int | None) -> Stamp | None:
    """What is newest there. Raises FileExistsError where another start writes: it would soon prune ``stamp``, unheard.

    Raises FileNotFoundError as ``newest_on`` does.
    """
    newest = newest_on(store, noted)
    if newest is not None and elsewhere(stamp.incarnation, newest.incarnation):
        raise FileExistsError(rival(store.root, newest, "what this one saves is kept nowhere"))
    return newest
