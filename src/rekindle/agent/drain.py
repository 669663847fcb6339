"""From memory to storage: which snapshot goes next, and carrying it there."""

from __future__ import annotations

import contextlib
import logging
import math
import time
from dataclasses import dataclass, field

from rekindle.common.os_errors import describe_error
from rekindle.errors import CorruptError
from rekindle.format.lineage import CheckpointKey, ShardId, continued_by_another, drop_superseded
from rekindle.format.shard import OpenShard
from rekindle.memory.clean_up import remove_departed_ranks
from rekindle.memory.job import JobInfo
from rekindle.memory.job_dir import JobDir
from rekindle.memory.notes import RootIdentity
from rekindle.storage.back import prune_chosen
from rekindle.storage.catalog import StoredCopy, find_copies
from rekindle.storage.checks import check_written, lacks, newest_on, overtaken, rival, trace_of, was_deleted
from rekindle.storage.open import open_store
from rekindle.storage.store import Store
from rekindle.storage.throttle import Budget, drain_interval

__all__ = ["TICK", "Drainer", "DrainProgress"]

log = logging.getLogger("rekindle.agent")

TICK = 0.05
"""Seconds between two looks for something to drain."""

_RETRY_FIRST, _RETRY_LONGEST = 0.5, 30.0
"""Seconds between attempts while storage refuses, doubled each time."""

_DOUBT = 30.0
"""Seconds between looks at whether what has become durable is still there: somebody may have put an older copy of the
root in its place."""

_OTHER_NODES = 0.2
"""Seconds between looks at whether the other nodes have finished their parts."""
_OVERDUE, _TELL_EVERY = 60.0, 30.0
"""Seconds that other nodes get before somebody is told of it, and between two looks whose part is missing."""
_UNFINISHED = 3
"""Steps of which this node leaves its part on storage, while no other node has begun to write its own."""


@dataclass
class DrainProgress:
    """What the drain is doing, for people to look at. Written by the drain, read by any thread."""

    step: int | None = None
    """Step being drained."""
    done: int = 0
    total: int = 0
    """Bytes."""
    durable: int | None = None
    """Newest step that this drainer saw on storage."""
    drained: int = 0
    """Checkpoints carried to storage."""
    seconds: float = 0.0
    """Time that the last one took."""
    moved: float | None = None
    """When storage last answered, by this node's clock; None while it is asked nothing."""
    anew: int | None = None
    """The step with which a root that was deleted has been made anew."""
    given_up: str | None = None
    """Why what memory holds is not drained, where that is no failure."""
    waits: str | None = None
    """Whose part of a step another node has not brought for a while."""
    error: str | None = None
    """Why the last attempt failed; None when it didn't."""


@dataclass
class Drainer:
    """Carries a job's snapshots from this node's memory to storage. All it needs to know is in files.

    ``tick`` is to be called again and again, by one thread in one process per node: the agent, or a trainer that can't
    have one.
    """

    job: JobDir
    progress: DrainProgress = field(default_factory=DrainProgress)
    _settled: CheckpointKey | None = None
    _doubt_at: float = 0.0
    """When to look again whether storage still has it."""
    _broken: set[CheckpointKey] = field(default_factory=set)
    _waiting: dict[CheckpointKey, tuple[ShardId, float]] = field(default_factory=dict)
    """Steps of which this node's part is on storage, and other ranks' parts are not; and since when."""
    _tell_at: float = 0.0
    """When to look again whose part is missing."""
    _trace: RootIdentity | None = None
    """Of the root into which something was published last."""
    _ask_at: float = 0.0
    _look_at: float = 0.0
    """When to look again for what a rank of this node has put straight on storage."""
    _retry_at: float = 0.0
    _delay: float = _RETRY_FIRST
    _budget: Budget = field(default_factory=Budget)
    """One for all ranks of the node, whose shards are carried one after the other."""

    def hurry(self, on: bool = True) -> None:
        """No I/O budget from now on, in the drain in hand either: somebody waits, or the node may be gone soon.

        With False the budget counts again. For any thread, at any moment.
        """
        self._budget.lift(on)

    def tick(self) -> bool:
        """Drain the newest snapshot that should be on storage and isn't. True when one became durable."""
        if time.monotonic() < self._retry_at:
            return False
        info = copy = None
        self.progress.moved = time.monotonic()
        try:
            info = self.job.read_job()
            if info is None:
                return False
            self._budget.limit = info.drain_limit
            if self._waiting and time.monotonic() >= self._ask_at:
                self._ask_again(info)
            copy = self._next(info)
            done = copy is not None and self._drain(info, copy)
        except _Superseded:
            return False
        except CorruptError as error:
            self.progress.error = str(error)
            if copy is None or info is None:
                self._put_off()
                return False
            self._broken.add(copy.checkpoint)
            log.error("a snapshot will not be drained: %s", error)
            with contextlib.suppress(OSError):
                open_store(info.root).discard(copy.stamp)
            return False
        except OSError as error:
            self.progress.error = f"{info.root if info is not None else self.job.path}: {describe_error(error)}"
            self._put_off()
            if copy is not None and info is not None:
                with contextlib.suppress(OSError):
                    open_store(info.root).make_room(copy.stamp)
            return False
        finally:
            self.progress.step = self.progress.moved = None
        self._delay = _RETRY_FIRST
        return done

    def _put_off(self) -> None:
        self._retry_at = time.monotonic() + self._delay
        log.warning("not drained, next try in %.1f s: %s", self._delay, self.progress.error)
        self._delay = min(2 * self._delay, _RETRY_LONGEST)

    def _complete(self, info: JobInfo, look: bool = True, waiting: bool = False) -> list[StoredCopy]:
        """Snapshots in this node's memory that all of its ranks have, newest first, none abandoned or damaged.

        With ``waiting`` those too of which this node has nothing left to do, and others have. Without ``look`` nothing
        is asked of storage.
        """
        store = open_store(info.root)

        def has_all(copy: StoredCopy) -> bool:
            # A rank that found no room in memory has put its part straight into the unfinished checkpoint.
            missing = set(_local(info, copy)) - copy.ranks
            return (look or not missing) and all(
                store.has_shard(ShardId(copy.step, rank, copy.world, copy.incarnation)) for rank in missing
            )

        return [
            c
            for c in drop_superseded(find_copies(self.job, None))
            if c.checkpoint not in self._broken and (waiting or c.checkpoint not in self._waiting) and has_all(c)
        ]

    def _next(self, info: JobInfo) -> StoredCopy | None:
        self.progress.given_up = None
        trained = bool(self.job.trainers())
        look = not trained or time.monotonic() >= self._look_at
        complete = self._complete(info, look)
        if look:
            self._look_at = time.monotonic() + open_store(info.root).poll
        if complete and complete[0].checkpoint != self._settled and trained and not self._due(info):
            # A part that a rank has put on storage itself waits there for the others, which memory keeps no longer.
            complete = [c for c in complete if c.persist or not c.ranks.issuperset(_local(info, c))]
        copy = self._first(complete)
        if copy is None or self._is_settled(copy):
            return None
        store = open_store(info.root)
        newest = self._newest_durable(store)
        if newest is not None and newest.checkpoint == copy.checkpoint:
            # Again: an agent that was killed may not have come to sync what it wrote.
            if self._publish(store, copy.stamp):
                self._became_durable(store, info, copy.checkpoint)
        elif newest is None and self._was_deleted(store):
            return self._anew(info, complete if trained else [])
        elif newest is None or _goes_beyond(copy, newest):
            return copy
        elif trained and continued_by_another(copy.incarnation, newest.incarnation):
            self._left_behind(info, newest)
        self._settle(copy.checkpoint)
        return None

    def _first(self, complete: list[StoredCopy]) -> StoredCopy | None:
        """The newest one; before it, oldest first, those that are to be pinned: none comes to storage after a newer."""
        ahead = (c for c in complete[::-1] if c.pinned and (self._settled is None or c.checkpoint > self._settled))
        return next(ahead, next(iter(complete), None))

    def _due(self, info: JobInfo) -> bool:
        """True if storage may get a snapshot unasked: the last drain began long enough ago.

        That is noted in a file, so a restart of the agent changes nothing. A clock that was set back, as by a new boot
        where memory outlives it, costs one drain too many.
        """
        if info.persist_seconds is None:
            return False
        began, seconds = self.job.notes.last_drain() or (-math.inf, 0.0)
        return not seconds <= time.monotonic() - began < drain_interval(info.persist_seconds, seconds)

    def _was_deleted(self, store: Store) -> bool:
        return was_deleted(store, self.job.notes.durable(), self.job.notes.root_identity())

    def _anew(self, info: JobInfo, complete: list[StoredCopy]) -> StoredCopy | None:
        """What goes into a root that was deleted: what the start that trains now has saved. The rest went with it."""
        ours = next((copy for copy in complete if copy.incarnation.id == info.start), None)
        if ours is not None:
            self.progress.anew = ours.step
        elif not complete:
            self.progress.given_up = (
                f"{info.root}: was deleted; what memory still has of it is given up when the job starts again, or "
                f"{info.idle_timeout:.0f} s after its end"
            )
        return ours

    def _settle(self, key: CheckpointKey) -> None:
        self._settled, self._doubt_at = key, time.monotonic() + _DOUBT

    def _is_settled(self, copy: StoredCopy) -> bool:
        return copy.checkpoint == self._settled and time.monotonic() < self._doubt_at

    def _left_behind(self, info: JobInfo, newest: ShardId) -> None:
        why = rival(info.root, newest, "what this one saves stays in memory")
        if self.progress.error != why:
            log.warning("not drained: %s", why)
        self.progress.error = why

    def _newest_durable(self, store: Store) -> ShardId | None:
        """The newest checkpoint on storage that no start of the job has abandoned, as far as this node can tell."""
        starts = {copy.incarnation for copy in find_copies(self.job, None)}
        return newest_on(store, self.job.notes.durable(), starts, self.job.notes.root_identity())

    def pending(self) -> int | None:
        """The step in this node's memory that storage lacks, or has this node's part of only. None of a root that was
        deleted.

        Raises OSError when storage can't be listed.
        """
        info = self.job.read_job()
        complete = self._complete(info, waiting=True)[:1] if info else []
        if info is None or not complete:
            return None
        store = open_store(info.root)
        newest = self._newest_durable(store)
        if newest is None and self._was_deleted(store):
            return None
        if newest is None or _goes_beyond(complete[0], newest):
            if complete[0].checkpoint in self._waiting and time.monotonic() >= self._tell_at:
                self._tell(store, complete[0].checkpoint)
            return complete[0].step
        return None

    def _tell(self, store: Store, key: CheckpointKey) -> None:
        """Say whose part is missing."""
        told, self._tell_at = self.progress.waits, time.monotonic() + _TELL_EVERY
        self.progress.waits = lacks(store, self._waiting[key][0])
        if self.progress.waits not in (None, told):
            log.warning("%s", self.progress.waits)

    def _drain(self, info: JobInfo, copy: StoredCopy) -> bool:
        began = time.monotonic()
        store = open_store(info.root)
        stamps = [ShardId(copy.step, rank, copy.world, copy.incarnation) for rank in _local(info, copy)]
        try:
            self._write(store, copy, stamps)
            self._newest_durable(store)
            if not self._publish(store, stamps[0]):
                if check_written(store, stamps):
                    self._wait_for_others(store, stamps)
                return False
        except FileNotFoundError:
            if overtaken(store, stamps[0]):  # another node has removed what was written of it, for it is of no use
                return False
            raise
        if not copy.pinned and any(c.pinned for c in find_copies(self.job, None) if c.checkpoint == copy.checkpoint):
            store.pin(stamps[0])  # asked for since
        self.progress.drained += 1
        self.progress.seconds = time.monotonic() - began
        with contextlib.suppress(OSError):  # memory is gone, and with it what else could be drained
            self.job.notes.write_last_drain(began, self.progress.seconds)
        self._became_durable(store, info, copy.checkpoint)
        log.debug("step %d is durable after %.2f s, %d bytes", copy.step, self.progress.seconds, self.progress.total)
        return True

    def _write(self, store: Store, copy: StoredCopy, stamps: list[ShardId]) -> None:
        with contextlib.ExitStack() as pins:
            # All pinned before the first byte moves: from here on nothing that the trainers do can take the step away.
            shards = [pins.enter_context(_pin(copy, s)) for s in stamps if not store.has_shard(s)]
            self.progress.step, self.progress.done = copy.step, 0
            self.progress.total = sum(shard.receipt.file_bytes for shard in shards)
            for shard in shards:
                with shard.map() as source:
                    store.write_shard(shard.receipt, source, self._count, self._budget)

    def _wait_for_others(self, store: Store, stamps: list[ShardId]) -> None:
        """The last node to finish publishes. While none does, what this one leaves there must not grow for ever."""
        stamp = stamps[0]
        self._waiting[stamp.checkpoint] = stamp, time.monotonic()
        for step in store.withdraw(stamp, [s.rank for s in stamps], _UNFINISHED):
            key = CheckpointKey(step, stamp.incarnation)
            self._waiting.pop(key, None)
            self._broken.add(key)  # newer ones wait, and it is not to be written again

    def _publish(self, store: Store, stamp: ShardId) -> bool:
        self._trace = trace_of(store, stamp.step)
        return store.publish(stamp)

    def _count(self, nbytes: int) -> None:
        self.progress.done += nbytes
        self.progress.moved = time.monotonic()

    def _ask_again(self, info: JobInfo) -> None:
        """Publish what the other nodes have finished meanwhile; forget what they have given up."""
        store = open_store(info.root)
        self._ask_at = time.monotonic() + max(_OTHER_NODES, store.poll)
        for key, (stamp, since) in list(self._waiting.items()):
            try:
                published = self._publish(store, stamp)
            except CorruptError as error:
                log.error("%s", error)
                store.discard(stamp)
                self._broken.add(key)
                del self._waiting[key]
                continue
            if published:
                self._became_durable(store, info, key)
                del self._waiting[key]
            elif not store.has_shard(stamp):
                del self._waiting[key]  # overtaken by a newer one; else it is drained again
            elif time.monotonic() >= max(since + _OVERDUE, self._tell_at):
                self._tell(store, key)

    def _became_durable(self, store: Store, info: JobInfo, key: CheckpointKey) -> None:
        with contextlib.suppress(OSError):  # memory is gone, and the snapshots that the note is for
            self.job.notes.write_durable(key[0], self._trace)
        self.progress.durable, self.progress.error, self.progress.waits = key[0], None, None
        self._settle(key)
        remove_departed_ranks(self.job, key)
        removed = prune_chosen(store, self.job, key[1].generation, info.keep, info.keep_every)
        store.clean_up()
        if removed:
            log.debug("removed surplus checkpoints of steps %s", removed)


class _Superseded(Exception):
    """The trainers have taken the snapshot's file for a newer one."""


def _pin(copy: StoredCopy, stamp: ShardId) -> OpenShard:
    try:
        shard = copy.files.shard(stamp.rank, stamp.world)
    except FileNotFoundError as error:
        raise _Superseded from error
    found = shard.receipt.stamp
    if (found.checkpoint, found.rank, found.world) != (copy.checkpoint, stamp.rank, stamp.world):
        shard.close()
        raise _Superseded
    return shard


def _goes_beyond(copy: StoredCopy, newest: ShardId) -> bool:
    """Whether storage should get ``copy`` though it has ``newest``, which may be an older start's of the same step."""
    return newest.checkpoint < copy.checkpoint and not continued_by_another(copy.incarnation, newest.incarnation)


def _local(info: JobInfo, copy: StoredCopy) -> list[int]:
    """This node's ranks in the world that wrote the copy; all of its ranks that are here, if that was another world."""
    return info.ranks if copy.world == info.world else sorted(copy.ranks)
