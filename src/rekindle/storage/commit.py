"""Commits checkpoints: carries shards to storage and makes them durable, in an order that survives any crash.

Every writer of checkpoints goes through ``Committer``: the agent's drain, saves straight to storage,
torch.distributed.checkpoint and ``rekindle import``. The steps, in this order, and the loss that each protects from:

1. Look (``begin``, or ``newest`` and ``hold_claim`` for a writer that decides by itself). A mount that is gone is
   refused: bytes written below its place vanish with the next mount. A root that another start of the job writes to, or
   has claimed, is refused: that start's retention would remove this checkpoint unnoticed.
2. Write (``write``). Each shard is verified on its way and synced, and only then followed by its receipt. No restore
   reads it yet, so a crash leaves nothing half written that counts: the next agent goes on with it, or clean-up removes
   it when a newer checkpoint is durable.
3. Look again (``commit``). The mount may have gone while bytes moved.
4. Identify the root's file system, while there is no checkpoint to lose. A later start can then tell a root that was
   deleted from one that is not mounted.
5. Publish: write the manifest, once the shards of all ranks are there, and after one more look for a claim: of a start
   that was passed over no more comes to storage than what was whole before. The checkpoint exists from here on. A crash
   before leaves none of it, a crash after leaves all of it. Publishing again changes nothing but what a crash left
   unsynced.
6. Pin the checkpoint, if the user asked for that while bytes moved: before anything is pruned.
7. Note the step in memory. Should storage be away when the job starts again, that start knows what it had, and does not
   go on from less. A crash before the note is harmless: the next agent publishes again, and notes it.
8. Prune (``tidy``), after the same look. Older checkpoints go only now, so that no crash leaves the job without one.
9. Clean up what killed writers left. A crash or an error in 8 or 9 leaves work to the next commit, and costs disk space
   until then: the checkpoint is durable, so no save fails by it.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress

from rekindle.common.os_errors import explain
from rekindle.errors import NotDurableError
from rekindle.format.claim import Starts
from rekindle.format.lineage import Incarnation, ShardId, continued_by_another
from rekindle.format.receipt import Receipt
from rekindle.memory.job_dir import JobDir
from rekindle.memory.notes import RootIdentity
from rekindle.storage.checks import checkpoints_deleted, describe_rival, is_superseded, newest_live, root_identity
from rekindle.storage.claims import hold_claim
from rekindle.storage.store import Store
from rekindle.storage.throttle import Budget

__all__ = ["Committer", "SupersededError"]

log = logging.getLogger("rekindle")

_untidy: set[str] = set()
"""Roots at which this process could not tidy the last time, and has logged it."""


class SupersededError(NotDurableError):
    """A newer checkpoint took the place of one that was not durable yet, so nobody needs the older one any more."""

    def __init__(self, stamp: ShardId, why: str = "a checkpoint as new is on storage already") -> None:
        super().__init__(f"step {stamp.step} was given up: {why}")


class Committer:
    """Commits checkpoints of one job to one store, for one writer, by the steps that the module describes.

    The calls for a checkpoint: ``begin``, ``write`` for each shard of this writer, ``commit``, and ``tidy`` if that
    returned True. Other writers, on any node, may commit other ranks' shards of it at the same time: the last one to
    finish makes it durable, and ``commit_if_complete`` tells the others so. For one thread at a time. Every method but
    ``tidy`` raises OSError where storage refuses.
    """

    def __init__(self, store: Store, job: JobDir | None, starts: Callable[[], Starts | None] = lambda: None) -> None:
        """``starts`` tells which start writes, as the next one may come meanwhile: its claim of the root is looked for.
        None for a writer without claims, such as an import."""
        self._store, self._starts = store, starts
        self._job = job
        """Holds the note of what is durable. None without a memory store: then only this object remembers it."""
        self._shown: int | None = None
        """Newest step that storage has shown to this writer."""
        self._identity: RootIdentity | None = None
        """Identity of the file system that showed it."""
        self._unpublished: ShardId | None = None
        """Newest shard that this writer has written and not published, because other ranks' shards were missing."""

    def newest(self, starts: Iterable[Incarnation] = ()) -> ShardId | None:
        """Returns the newest live checkpoint on storage, given all known ``starts`` of the job; None without one.

        Raises FileNotFoundError where storage had a checkpoint and shows nothing now, though nobody deleted it: it is
        not mounted.
        """
        newest = self._look(starts)
        if newest is not None:
            self._shown, self._identity = newest.step, root_identity(self._store, newest.step)
        return newest

    def begin(self, stamp: ShardId) -> ShardId | None:
        """Returns the newest live checkpoint, to be asked before the first byte of ``stamp`` is written.

        Raises FileNotFoundError as ``newest`` does, and FileExistsError where another start of the job writes, or has
        claimed the root.
        """
        newest = self.newest()
        if newest is not None and continued_by_another(stamp.incarnation, newest.incarnation):
            raise FileExistsError(describe_rival(self._store.root, newest, "what this one saves is not kept"))
        self.hold_claim()
        return newest

    def hold_claim(self) -> None:
        """Makes sure that the start has the newest claim. Raises FileExistsError where another one has claimed the
        root since."""
        self._see_claim(make=True)

    def _see_claim(self, *, make: bool = False) -> None:
        starts = self._starts()
        if starts is not None:
            hold_claim(self._store, starts, make=make)

    def root_deleted(self) -> bool:
        """True if storage had a checkpoint, and somebody has deleted all of it since."""
        return checkpoints_deleted(self._store, *self._expected())

    def write(
        self,
        receipt: Receipt,
        source: memoryview,
        progress: Callable[[int], object] = lambda nbytes: None,
        budget: Budget | None = None,
    ) -> None:
        """Writes one rank's shard: see ``Store.write_shard``. Precondition: ``begin``, or both ``newest`` and
        ``hold_claim``, refused nothing.

        Raises SupersededError where others have removed it, as a checkpoint as new is durable.
        """
        with self._superseded_noticed(receipt.stamp):
            self._store.write_shard(receipt, source, progress, budget)

    def commit(self, stamp: ShardId, written: Sequence[ShardId]) -> bool:
        """Makes a checkpoint durable, if the shards of all ranks are there. False while some are missing.

        ``written`` are those that this writer has put there. Raises SupersededError as ``write`` does,
        FileNotFoundError where they are gone, CorruptError when the shards don't make up a whole.
        """
        with self._superseded_noticed(stamp):
            self._look()
            if self.commit_if_complete(stamp):
                return True
            self._check_present(written)
        self._unpublished = next(iter(written), None)
        return False

    def commit_if_complete(self, stamp: ShardId) -> bool:
        """Makes a checkpoint durable as ``commit`` does, without another look at its mount. True if it is durable.

        Precondition: this writer has written nothing of it since it looked last. A look is a listing of the root, too
        dear to be repeated several times a second while other nodes write.
        """
        identity = root_identity(self._store, stamp.step)
        if not self._store.publish(stamp, self._see_claim):
            return False
        if self._pinned_meanwhile(stamp):
            self._store.pin(stamp)
        self._shown, self._identity = stamp.step, identity
        if self._job is not None:
            with suppress(OSError):  # memory is gone, and with it the snapshots that the note is for
                self._job.notes.write_durable(stamp.step, identity)
        return True

    def tidy(self, stamp: ShardId, keep: int | None, keep_every: int | None) -> list[int]:
        """Prunes older checkpoints, and cleans up after killed writers. Returns the steps that were removed.

        Where storage refuses, that is logged once, until it works again. Precondition: ``stamp`` is durable, by the
        word of ``commit`` or ``commit_if_complete``.
        """
        removed: list[int] = []
        root = str(self._store.root)
        try:
            self._see_claim()
            if not self._undecided(stamp.incarnation.generation):
                removed = self._store.prune(keep, keep_every)
            self._store.clean_up()
            _untidy.discard(root)
        except OSError as error:
            if root not in _untidy:
                log.warning(
                    "surplus checkpoints stay at %s and take up room, until one of the next saves can remove them: %s",
                    *(root, explain(error)),
                )
            _untidy.add(root)
        return removed

    def _look(self, starts: Iterable[Incarnation] = ()) -> ShardId | None:
        self._shown, self._identity = self._expected()
        return newest_live(self._store, self._shown, starts, self._identity)

    def _expected(self) -> tuple[int | None, RootIdentity | None]:
        """A step that storage must show something of, or None; the identity of the file system that had it."""
        if self._shown is not None:
            return self._shown, self._identity
        noted = self._job.notes.durable() if self._job is not None else None
        if self._job is not None and noted is not None:
            return noted, self._job.notes.root_identity()
        if self._unpublished is not None and not self._store.has_shard(self._unpublished):
            return self._unpublished.step, None  # the last one of the ranks has made it durable since
        return None, None

    @contextmanager
    def _superseded_noticed(self, stamp: ShardId) -> Iterator[None]:
        """Turns FileNotFoundError into SupersededError where others have cleaned up: no mount is missing then."""
        try:
            yield
        except FileNotFoundError as error:
            if is_superseded(self._store, stamp):
                raise SupersededError(stamp) from error
            raise

    def _check_present(self, written: Sequence[ShardId]) -> None:
        """Raises FileNotFoundError where what was written is gone: it went to the place of a mount that is back."""
        if not written or all(self._store.has_shard(stamp) for stamp in written) or self._store.durable(written[0]):
            return
        raise FileNotFoundError(
            errno.ENOENT, f"what was written of step {written[0].step} is gone", str(self._store.root)
        )

    def _pinned_meanwhile(self, stamp: ShardId) -> bool:
        """True if the user has pinned the checkpoint in memory since ``stamp`` was read there."""
        if stamp.pinned or self._job is None:
            return False
        return any(one.pinned for one, _ in self._job.snapshots.shard_ids() if one.checkpoint == stamp.checkpoint)

    def _undecided(self, generation: int) -> bool:
        """True while a run that was deleted is back beside the one begun since, and nobody has said which counts.

        The choice is made by a start of the job: once a checkpoint of its ``generation`` is durable, the note goes.
        """
        fresh_start = self._job.notes.fresh_start() if self._job is not None else None
        if self._job is None or fresh_start is None:
            return False
        since, chosen = fresh_start
        if generation < chosen:
            return any(entry.stamp.incarnation.generation < since for entry in self._store.published())
        with suppress(OSError):  # memory is gone, and the note with it
            self._job.notes.forget_fresh_start()
        return False
