"""What every store of checkpoints promises. ``rekindle.testing.StoreContract`` holds any of them to it."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection
from dataclasses import dataclass

from rekindle.common.os_errors import describe_error
from rekindle.format.files import Files
from rekindle.format.lineage import Incarnation, ShardId, live
from rekindle.format.names import Root
from rekindle.format.receipt import Receipt
from rekindle.memory.notes import RootIdentity
from rekindle.storage.retention import surviving
from rekindle.storage.throttle import Budget

__all__ = ["Contents", "Published", "Store", "unread_entry"]

log = logging.getLogger("rekindle")

_told: set[str] = set()


@dataclass(frozen=True)
class Published:
    """A durable checkpoint."""

    stamp: ShardId
    files: Files
    saved_at: float | None = None
    """When it became durable, in seconds since 1970; None where its manifest doesn't say."""
    pinned: bool = False
    """True while retention has to leave it alone."""


@dataclass(frozen=True)
class Contents:
    """All that one look at a root has shown."""

    published: list[Published]
    damaged: list[tuple[int, Files]]
    """Step and files of what has a manifest which makes no sense, or is among the ``unread``."""
    unread: list[tuple[int, str]]
    """Steps, and what keeps their manifests from being read. They may be sound, and of any start of the job."""


def unread_entry(step: int, where: str, error: OSError) -> tuple[int, str]:
    """An entry of ``Contents.unread``. The log tells of it once."""
    what = f"{where}: {describe_error(error)}"
    if where not in _told:
        _told.add(where)
        log.warning("step %d on storage is left as it is and passed over, for it can't be read: %s", step, what)
    return step, what


class Store(ABC):
    """The checkpoints under one root. Any number of processes may use the same root, and any thread a store.

    A checkpoint is visible from the moment at which ``publish`` has written its manifest: whole, or not at all, whoever
    dies when. Nothing removes or replaces one before a newer one of the live lineage is durable. Where storage refuses,
    every method raises OSError, after a bounded time.
    """

    root: Root

    poll: float
    """Seconds between two looks at whether others have finished their parts: a look may cost time and money."""

    # -- reading ------------------------------------------------------------------------------------------------

    @abstractmethod
    def contents(self) -> Contents:
        """Every durable checkpoint, oldest step first, and what else has a manifest; nothing where nobody has written.

        A manifest that can't be read keeps nobody from the others. Where none can be read, that is raised: storage is
        out of order.
        """

    def published(self) -> list[Published]:
        """Every durable checkpoint, oldest step first."""
        return self.contents().published

    def damaged(self) -> list[tuple[int, Files]]:
        """Step and files of every checkpoint that has a manifest which can't be read."""
        return self.contents().damaged

    def find(self, step: int, incarnation: Incarnation | None = None) -> Published | None:
        """The durable checkpoint of ``step``, of one incarnation if given; else the youngest one."""
        match = [p for p in self.published() if p.stamp.step == step]
        if incarnation is not None:
            match = [p for p in match if p.stamp.incarnation == incarnation]
        return match[-1] if match else None

    @abstractmethod
    def durable(self, stamp: ShardId) -> bool:
        """Whether the checkpoint is durable and the one that its step is known by. A look-up, not a listing."""

    def trace(self, step: int) -> RootIdentity | None:
        """What ``was_deleted`` has to know later of the file system that shows ``step``, durable or not.

        None where none does, or where nothing needs to be known.
        """
        return None

    def was_deleted(self, trace: RootIdentity | None) -> bool:
        """Whether a root that shows nothing was deleted, or emptied, since ``trace`` was taken; else it may be out of
        sight. Raises OSError when that can't be told."""
        return False

    # -- writing ------------------------------------------------------------------------------------------------

    @abstractmethod
    def has_shard(self, stamp: ShardId) -> bool:
        """Whether this rank's part of an unfinished checkpoint is already there, and there to stay."""

    @abstractmethod
    def write_shard(
        self,
        receipt: Receipt,
        source: memoryview,
        progress: Callable[[int], object],
        budget: Budget | None = None,
    ) -> None:
        """Copy one rank's shard, verified on the way, and then its receipt. There to stay when this returns.

        ``source`` is the whole file, best page-aligned; it is only read, and no view of it is kept. ``progress`` is
        given byte counts. ``budget`` limits bytes per second.

        Raises CorruptError when ``source`` differs from its checksums, OSError when storage refuses.
        """

    @abstractmethod
    def discard(self, stamp: ShardId) -> None:
        """Remove an unfinished checkpoint that can't be finished."""

    def make_room(self, stamp: ShardId) -> None:
        """Storage has refused something, and the next try may be of a newer step: free what this one has taken."""
        self.discard(stamp)

    @abstractmethod
    def publish(self, stamp: ShardId) -> bool:
        """Write the manifest if every rank's part is there. True when the checkpoint is durable.

        It is pinned from that moment on if a rank's part says so.

        Ranks on other nodes may publish the same checkpoint at the same time: what they write is the same. Raises
        CorruptError when the parts don't make up a whole, FileExistsError where another start of the job has taken the
        step, and the store can't keep both.
        """

    def withdraw(self, stamp: ShardId, ranks: Collection[int], keep: int) -> list[int]:
        """Remove what ``ranks`` have written of unfinished steps that nobody else has begun, and tell the steps.

        The newest ``keep`` of the incarnation of ``stamp`` stay. A store that can't tell who has begun removes nothing.
        """
        return []

    # -- tidying ------------------------------------------------------------------------------------------------

    @abstractmethod
    def clean_up(self) -> None:
        """Finish what a killed drain or removal left half done, and remove what nobody can use any more.

        While a manifest can't be read, what starts have left that show no other one stays: it may be theirs.
        """

    @abstractmethod
    def prune(self, keep: int | None, keep_every: int | None) -> list[int]:
        """Remove what is ``surplus``, and tell the steps."""

    def surplus(self, keep: int | None, keep_every: int | None) -> list[Published]:
        """Checkpoints that ``prune`` would remove. Those stay that are pinned, or named by ``retention.surviving``.

        What an incarnation abandoned goes as soon as that incarnation has a checkpoint of its own on storage. What
        can't be read stays, and so does all that is older: its start may have gone on from there.
        """
        contents = self.contents()
        stay = surviving(live([entry.stamp for entry in contents.published]), keep, keep_every)
        after = max((step for step, _ in contents.unread), default=-1)
        return [
            entry
            for entry in contents.published
            if not entry.pinned and entry.stamp not in stay and entry.stamp.step > after
        ]

    @abstractmethod
    def pin(self, stamp: ShardId) -> None:
        """Keep a durable checkpoint from ``prune`` until ``unpin``, though its lineage be abandoned. Idempotent.

        Raises FileNotFoundError when it isn't there.
        """

    @abstractmethod
    def unpin(self, stamp: ShardId) -> None:
        """Let retention decide on a checkpoint again, pinned or not."""

    @abstractmethod
    def write_extra(self, name: str, data: bytes) -> None:
        """Put something else beside the checkpoints, for people: a file of this name, which may have slashes."""

    @abstractmethod
    def has(self, name: str) -> bool:
        """Whether there is what ``write_extra`` has put there."""

    @abstractmethod
    def take_away(self, name: str) -> None:
        """Remove what ``write_extra`` has put there, if it is there."""

    @abstractmethod
    def check_writable(self) -> None:
        """Raise OSError where nothing could be written now. Leaves nothing behind."""

    @abstractmethod
    def capability_warning(self) -> str | None:
        """A promise that this storage turns out not to keep, in words for its user; None when all is well.

        Writes something and removes it again; for the start of a job.
        """
