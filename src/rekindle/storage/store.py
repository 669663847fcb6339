"""Defines the contract of a store of checkpoints. ``rekindle.testing.StoreContract`` tests any store against it."""

from __future__ import annotations

import errno
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection
from dataclasses import dataclass

from rekindle.common.os_errors import describe_error
from rekindle.format.files import Files
from rekindle.format.lineage import Incarnation, ShardId, drop_superseded
from rekindle.format.metric import Metric
from rekindle.format.names import Root
from rekindle.format.receipt import Receipt
from rekindle.memory.notes import RootIdentity
from rekindle.storage.retention import surviving
from rekindle.storage.throttle import Budget

__all__ = ["Contents", "Published", "Store", "unread_entry"]

log = logging.getLogger("rekindle")

_warned: set[str] = set()
"""Manifests whose read error was logged. One per process: a store may be opened again and again, the log is one."""


@dataclass(frozen=True)
class Published:
    """A durable checkpoint."""

    stamp: ShardId
    files: Files
    saved_at: float | None = None
    """Time at which it became durable, in seconds since 1970; None where its manifest doesn't say."""
    pinned: bool = False
    """True while retention must not remove it."""
    nbytes: int | None = None
    """Bytes of all shards; None where its manifest doesn't say."""


@dataclass(frozen=True)
class Contents:
    """The result of one listing of a root."""

    published: list[Published]
    damaged: list[tuple[int, Files]]
    """Step and files of checkpoints whose manifest is malformed or among the ``unread``."""
    unread: list[tuple[int, str]]
    """Steps whose manifests can't be read now, each with the reason. They may be sound, and of any start of the job."""


def unread_entry(step: int, where: str, error: OSError) -> tuple[int, str]:
    """Returns an entry for ``Contents.unread``, and logs a warning the first time."""
    what = f"{where}: {describe_error(error)}"
    if where not in _warned:
        _warned.add(where)
        log.warning("step %d on storage is skipped and not removed, because its manifest can't be read: %s", step, what)
    return step, what


class Store(ABC):
    """The checkpoints under one root. Any number of processes may use the same root, and any thread a store.

    A checkpoint becomes visible as a whole when ``publish`` writes its manifest, whichever process dies at whichever
    moment. No checkpoint is removed or replaced before a newer one of the live lineage is durable. Every method raises
    OSError within a bounded time when storage fails.
    """

    root: Root

    poll: float
    """Seconds between two checks for the parts of other ranks. A check may cost time and money."""

    # -- reading ------------------------------------------------------------------------------------------------

    @abstractmethod
    def contents(self) -> Contents:
        """Lists every durable checkpoint, oldest step first, and everything else that has a manifest.

        A root that nobody has written to is empty. A manifest that can't be read doesn't hide the others. When none of
        several manifests can be read, the first error is raised: then storage itself is out of order.
        """

    def published(self) -> list[Published]:
        """Lists every durable checkpoint, oldest step first."""
        return self.contents().published

    def damaged(self) -> list[tuple[int, Files]]:
        """Lists step and files of every checkpoint whose manifest is malformed or can't be read."""
        return self.contents().damaged

    def find(self, step: int, incarnation: Incarnation | None = None) -> Published | None:
        """Finds the durable checkpoint of ``step``: of ``incarnation`` if given, else of the youngest one."""
        match = [p for p in self.published() if p.stamp.step == step]
        if incarnation is not None:
            match = [p for p in match if p.stamp.incarnation == incarnation]
        return match[-1] if match else None

    @abstractmethod
    def durable(self, stamp: ShardId) -> bool:
        """True if the checkpoint is durable and is the one that its step is known by. A look-up, not a listing."""

    def trace(self, step: int) -> RootIdentity | None:
        """Identifies the file system that shows ``step``, durable or not, for a later ``was_deleted``.

        None where no file system shows it, or where ``was_deleted`` needs nothing.
        """
        return None

    def was_deleted(self, trace: RootIdentity | None) -> bool:
        """True if a root that shows nothing was deleted or emptied since ``trace`` was taken.

        Otherwise it may not be mounted. Raises OSError when neither can be told.
        """
        return False

    # -- writing ------------------------------------------------------------------------------------------------

    @abstractmethod
    def has_shard(self, stamp: ShardId) -> bool:
        """True if this rank's part of an unfinished checkpoint is already there and durable."""

    @abstractmethod
    def write_shard(
        self,
        receipt: Receipt,
        source: memoryview,
        progress: Callable[[int], object],
        budget: Budget | None = None,
    ) -> None:
        """Copies one rank's shard, verified on the way, and then its receipt. Both are durable on return.

        ``source`` is the whole file, best page-aligned. It is only read, and no view of it is kept. ``progress`` is
        given byte counts. ``budget`` limits bytes per second.

        Raises CorruptError when ``source`` differs from its checksums, OSError when storage refuses.
        """

    @abstractmethod
    def discard(self, stamp: ShardId) -> None:
        """Removes an unfinished checkpoint that can't be finished."""

    def make_room(self, stamp: ShardId) -> None:
        """Frees the space of an unfinished checkpoint after a refused write: the next try may be of a newer step."""
        self.discard(stamp)

    @abstractmethod
    def publish(self, stamp: ShardId, before: Callable[[], object] = lambda: None) -> bool:
        """Writes the manifest if every rank's part is there. Returns True when the checkpoint is durable.

        It is pinned from that moment on if a rank's part says so. ``before`` is called right before the manifest is
        written, and what it raises prevents that.

        Ranks on other nodes may publish the same checkpoint at the same time, as they write the same manifest. Raises
        CorruptError when the parts don't make up a whole state. Raises FileExistsError where another start of the job
        has published the step and the store can't keep both.
        """

    def withdraw(self, stamp: ShardId, ranks: Collection[int], keep: int, spared: Collection[int] = ()) -> list[int]:
        """Removes the parts of ``ranks`` in unfinished steps of the incarnation of ``stamp``. Returns these steps.

        The newest ``keep`` of them stay, the steps to be ``spared``, and the newest that each other rank has begun: it
        may just be writing its own. Call ``surplus_parts`` to choose. No step that has become durable meanwhile loses
        anything. A store that can't tell who has begun removes nothing.
        """
        return []

    # -- tidying ------------------------------------------------------------------------------------------------

    @abstractmethod
    def clean_up(self) -> None:
        """Finishes what a killed drain or removal left half done, and removes superseded unfinished steps.

        While a manifest can't be read, the unfinished steps of starts without a readable manifest stay: the unread
        one may be theirs.
        """

    @abstractmethod
    def prune(self, keep: int | None, keep_every: int | None, *, keep_best: bool = True) -> list[int]:
        """Removes the ``surplus`` checkpoints. Returns their steps."""

    def surplus(self, keep: int | None, keep_every: int | None, *, keep_best: bool = True) -> list[Published]:
        """Lists the checkpoints that ``prune`` would remove: neither pinned nor named by ``retention.surviving``.

        A superseded checkpoint goes as soon as the incarnation that superseded it has one of its own on storage. One
        whose manifest can't be read stays, and so do all older ones: its start may have gone on from any of them.
        """
        contents = self.contents()
        stands = drop_superseded([entry.stamp for entry in contents.published])
        stay = surviving(stands, keep, keep_every, keep_best=keep_best)
        after = max((step for step, _ in contents.unread), default=-1)
        return [
            entry
            for entry in contents.published
            if not entry.pinned and entry.stamp not in stay and entry.stamp.step > after
        ]

    @abstractmethod
    def pin(self, stamp: ShardId) -> None:
        """Keeps a durable checkpoint from ``prune`` until ``unpin``, even when it is superseded. Idempotent.

        Raises FileNotFoundError when it isn't there.
        """

    @abstractmethod
    def unpin(self, stamp: ShardId) -> None:
        """Lets retention decide on a checkpoint again, pinned or not."""

    def note_metric(self, stamp: ShardId, metric: Metric) -> None:
        """Adds ``metric`` to the manifest of a durable checkpoint, for one that was told after the save.

        The manifest is replaced as a whole. To be called for the newest checkpoint, which nothing prunes meanwhile.
        Raises FileNotFoundError when it isn't there, another OSError in a store that can't.
        """
        raise OSError(errno.ENOTSUP, "this store notes metrics only with a save", str(self.root))

    @abstractmethod
    def write_extra(self, name: str, data: bytes, *, exclusive: bool = False) -> None:
        """Writes a file beside the checkpoints. ``name`` may have slashes.

        With ``exclusive`` nobody sees a part of it, and FileExistsError is raised where there is one of this name. So
        one of many writers succeeds. The one that is there may be this one's own, where an answer was lost. It isn't
        synced: a power cut may take it.
        """

    def has(self, name: str) -> bool:
        """True if a file that ``write_extra`` wrote is there."""
        try:
            self.read_extra(name, 0)
        except (FileNotFoundError, NotADirectoryError):
            return False
        return True

    @abstractmethod
    def take_away(self, name: str) -> None:
        """Removes a file that ``write_extra`` wrote, if it is there."""

    @abstractmethod
    def extras(self, directory: str) -> list[str]:
        """Lists the names, as ``write_extra`` got them, of the files directly in ``directory``, in order.

        Empty when there is no such directory.
        """

    @abstractmethod
    def read_extra(self, name: str, most: int) -> bytes:
        """Reads the first ``most`` bytes of a file that ``write_extra`` wrote. A link is not followed.

        Raises FileNotFoundError when it isn't there, FormatError when it is no file.
        """

    @abstractmethod
    def check_writable(self) -> None:
        """Raises OSError if nothing could be written now. Leaves no file behind."""

    @abstractmethod
    def capability_warning(self) -> str | None:
        """Describes, for the user, a promise that this storage does not keep; None when it keeps all of them.

        Writes something and removes it again. Meant for the start of a job.
        """
