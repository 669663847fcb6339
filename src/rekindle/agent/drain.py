"""From memory to storage: which snapshot goes next, and carrying it there."""

from __future__ import annotations

import contextlib
import logging
import time
from dataclasses import dataclass, field
from pathlib import Path

from rekindle.errors import CorruptError
from rekindle.snapshot.lineage import Incarnation, Stamp, retired
from rekindle.snapshot.memory import Job, JobDir
from rekindle.snapshot.names import receipt_name
from rekindle.snapshot.shard import OpenShard
from rekindle.storage.catalog import Copy, survey
from rekindle.storage.pace import Budget
from rekindle.storage.posix import PosixStore

__all__ = ["Drainer", "Progress"]

log = logging.getLogger("rekindle.agent")

_RETRY_FIRST, _RETRY_LONGEST = 0.5, 30.0
"""Seconds between attempts while storage refuses, doubled each time."""

_OTHER_NODES = 0.2
"""Seconds between looks at whether the other nodes have finished their parts."""


@dataclass
class Progress:
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
    error: str | None = None
    """Why the last attempt failed; None when it didn't."""


@dataclass
class Drainer:
    """Carries a job's snapshots from this node's memory to storage. All it needs to know is in files.

    ``tick`` is to be called again and again, by one thread in one process per node: the agent, or a trainer that can't
    have one.
    """

    job: JobDir
    progress: Progress = field(default_factory=Progress)
    _settled: tuple[int, Incarnation] | None = None
    _broken: set[tuple[int, Incarnation]] = field(default_factory=set)
    _waiting: dict[tuple[int, Incarnation], Stamp] = field(default_factory=dict)
    """Steps of which this node's part is on storage, and other ranks' parts are not."""
    _ask_at: float = 0.0
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
        info = self.job.read_job()
        if info is None or time.monotonic() < self._retry_at:
            return False
        self._budget.limit = info.drain_limit
        copy = None
        try:
            if self._waiting and time.monotonic() >= self._ask_at:
                self._ask_again(info)
            copy = self._next(info)
            done = copy is not None and self._drain(info, copy)
        except _Superseded:
            return False
        except CorruptError as error:
            if copy is not None:
                self._broken.add(copy.key)
                PosixStore(Path(info.root)).discard(copy.stamp)
            self.progress.error = str(error)
            log.error("a snapshot will not be drained: %s", error)
            return False
        except OSError as error:
            self.progress.error = f"{info.root}: {error.strerror or error}"
            self._retry_at = time.monotonic() + self._delay
            log.warning("not drained, next try in %.1f s: %s", self._delay, self.progress.error)
            self._delay = min(2 * self._delay, _RETRY_LONGEST)
            if copy is not None:
                with contextlib.suppress(OSError):  # the next try may be of a newer step, and would want the room
                    PosixStore(Path(info.root)).discard(copy.stamp)
            return False
        finally:
            self.progress.step = None
        self._delay = _RETRY_FIRST
        return done

    def _complete(self, info: Job) -> list[Copy]:
        """Snapshots in this node's memory that all of its ranks have, newest first, none abandoned or damaged."""
        copies = survey(self.job, None)
        seen = [c.incarnation for c in copies]
        store = PosixStore(Path(info.root))

        def has_all(copy: Copy) -> bool:
            # A rank that found no room in memory has put its part straight into the unfinished checkpoint.
            missing = set(_local(info, copy)) - copy.ranks
            return all(store.has_shard(Stamp(copy.step, rank, copy.world, copy.incarnation)) for rank in missing)

        return [
            c
            for c in copies
            if c.key not in self._broken
            and c.key not in self._waiting
            and not retired(c.step, c.incarnation, seen)
            and has_all(c)
        ]

    def _next(self, info: Job) -> Copy | None:
        complete = self._complete(info)
        if complete and complete[0].key != self._settled and self.job.trainers():
            complete = [c for c in complete if c.persist]
        if not complete or complete[0].key == self._settled:
            return None
        copy, store = complete[0], PosixStore(Path(info.root))
        newest = self._newest_durable(store)
        if newest is not None and newest.key == copy.key:
            self._became_durable(store, info, copy.key)
        elif newest is None or _goes_beyond(copy, newest):
            return copy
        self._settled = copy.key
        return None

    def _newest_durable(self, store: PosixStore) -> Stamp | None:
        """The newest checkpoint on storage that no start of the job has abandoned, as far as this node can tell."""
        published = store.published()
        seen = {p.stamp.incarnation for p in published} | {c.incarnation for c in survey(self.job, None)}
        live = [p.stamp for p in published if not retired(p.stamp.step, p.stamp.incarnation, seen)]
        return live[-1] if live else None

    def pending(self) -> int | None:
        """The step in this node's memory that storage lacks, if any. Raises OSError when storage can't be listed."""
        info = self.job.read_job()
        complete = self._complete(info)[:1] if info else []
        if info is None or not complete:
            return None
        newest = self._newest_durable(PosixStore(Path(info.root)))
        return complete[0].step if newest is None or _goes_beyond(complete[0], newest) else None

    def _drain(self, info: Job, copy: Copy) -> bool:
        began = time.monotonic()
        store = PosixStore(Path(info.root))
        stamps = [Stamp(copy.step, rank, copy.world, copy.incarnation) for rank in _local(info, copy)]
        with contextlib.ExitStack() as pins:
            # All pinned before the first byte moves: from here on nothing that the trainers do can take the step away.
            shards = [pins.enter_context(_pin(copy, s)) for s in stamps if not store.has_shard(s)]
            self.progress.step, self.progress.done = copy.step, 0
            self.progress.total = sum(shard.receipt.file_bytes for shard in shards)
            for shard in shards:
                with shard.map() as source:
                    store.write_shard(shard.receipt, source, self._count, self._budget)
        if not store.publish(stamps[0]):
            self._waiting[copy.key] = stamps[0]  # the last node to finish publishes
            return False
        self.progress.drained += 1
        self.progress.seconds = time.monotonic() - began
        self._became_durable(store, info, copy.key)
        log.debug("step %d is durable after %.2f s, %d bytes", copy.step, self.progress.seconds, self.progress.total)
        return True

    def _count(self, nbytes: int) -> None:
        self.progress.done += nbytes

    def _ask_again(self, info: Job) -> None:
        """Publish what the other nodes have finished meanwhile; forget what they have given up."""
        self._ask_at = time.monotonic() + _OTHER_NODES
        store = PosixStore(Path(info.root))
        for key, stamp in list(self._waiting.items()):
            try:
                published = store.publish(stamp)
            except CorruptError as error:
                log.error("%s", error)
                store.discard(stamp)
                published = False
            if published:
                self._became_durable(store, info, key)
                del self._waiting[key]
            elif not store.has_shard(stamp):
                del self._waiting[key]
                self._broken.add(key)

    def _became_durable(self, store: PosixStore, info: Job, key: tuple[int, Incarnation]) -> None:
        with contextlib.suppress(OSError):  # full memory: the note only saves look-ups
            self.job.write_durable(key[0])
        self.progress.durable, self.progress.error = key[0], None
        self._settled = key
        self.job.remove_strangers()
        removed = store.prune(info.keep, info.keep_every)
        store.settle()
        if removed:
            log.debug("removed surplus checkpoints of steps %s", removed)


class _Superseded(Exception):
    """The trainers have taken the snapshot's file for a newer one."""


def _pin(copy: Copy, stamp: Stamp) -> OpenShard:
    try:
        shard = OpenShard.open(copy.path / receipt_name(stamp.rank, stamp.world), in_memory=True)
    except FileNotFoundError as error:
        raise _Superseded from error
    if shard.receipt.stamp.key != copy.key:
        shard.close()
        raise _Superseded
    return shard


def _goes_beyond(copy: Copy, newest: Stamp) -> bool:
    """Whether storage should get ``copy`` though it has ``newest``.

    Not when another start of the same generation is on storage: the job went on elsewhere, unable to see this node's
    memory, and what this node holds is a branch that nobody follows.
    """
    other = newest.incarnation
    elsewhere = other != copy.incarnation and other.generation >= copy.incarnation.generation
    return newest.step < copy.step and not elsewhere


def _local(info: Job, copy: Copy) -> list[int]:
    """This node's ranks in the world that wrote the copy; all of its ranks that are here, if that was another world."""
    return info.ranks if copy.world == info.world else sorted(copy.ranks)
