"""Drains a job's snapshots: carries them from this node's memory to storage."""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace

from rekindle.agent.backlog import Backlog, local_ranks
from rekindle.agent.compile_carrier import CompileCarrier
from rekindle.agent.pause import Pauses
from rekindle.agent.records import RecordCarrier
from rekindle.agent.stand_in import StandIn
from rekindle.agent.third_slots import ThirdSlots
from rekindle.agent.unfinished import Unfinished
from rekindle.common.os_errors import describe_error, explain
from rekindle.errors import CorruptError, FormatError
from rekindle.format.claim import Starts
from rekindle.format.lineage import ShardId, continued_by_another
from rekindle.format.shard import OpenShard
from rekindle.memory.asking import Asking
from rekindle.memory.clean_up import remove_departed_ranks
from rekindle.memory.job import JobInfo
from rekindle.memory.job_dir import JobDir
from rekindle.memory.mark import Mark
from rekindle.memory.starts import read_starts
from rekindle.storage.catalog import StoredCopy
from rekindle.storage.checks import describe_rival
from rekindle.storage.commit import Committer, SupersededError
from rekindle.storage.open import open_store
from rekindle.storage.throttle import Budget

__all__ = ["TICK", "DrainProgress", "Drainer"]

log = logging.getLogger("rekindle.agent")

TICK = 0.05
"""Seconds between two looks for something to drain."""

_RETRY_FIRST, _RETRY_LONGEST = 0.5, 30.0
"""Seconds between attempts while storage refuses, doubled each time. A rank that asks has them begin again."""
_LIMIT_EVERY = 1.0
"""Seconds between looks, during a drain, for the limit that a start of the job has been given since. A look reads a
small file in memory."""


@dataclass
class DrainProgress:
    """State of the drain, for people to look at. Written by the drain, read by any thread."""

    step: int | None = None
    """Step being drained."""
    done: int = 0
    """Bytes of it that storage has taken."""
    total: int = 0
    """Bytes of it in all."""
    durable: int | None = None
    """Newest step that this drainer saw on storage."""
    brought: tuple[int, str] | None = None
    """Step, and id of the incarnation, of the last checkpoint of which storage got this node's shards: all that this
    node can do for it."""
    drained: int = 0
    """Checkpoints carried to storage."""
    seconds: float = 0.0
    """Time that the last one took."""
    nbytes: int = 0
    """Bytes that storage has taken from this drainer, all in all."""
    busy: float = 0.0
    """Seconds that it has spent on that, and on attempts that failed."""
    failures: int = 0
    """Attempts that storage refused, and snapshots that were given up as damaged."""
    moved: float | None = None
    """Time at which storage last answered, by this node's clock; None while it is asked nothing."""
    anew: int | None = None
    """Step with which a root that was deleted has been made anew."""
    deleted: int | None = None
    """Newest step that this root had before, by which one deletion is told from the next."""
    given_up: str | None = None
    """Reason why the snapshots in memory are not drained, where that is no failure."""
    waits: str | None = None
    """Shards of a step that another node has not brought for a while."""
    error: str | None = None
    """Reason why the last attempt failed; None when it didn't."""


class Drainer:
    """Carries a job's snapshots from this node's memory to storage. All it needs to know is in files.

    ``tick`` is to be called again and again, by one thread in one process per node: the agent, or a trainer that can't
    have one.
    """

    def __init__(
        self,
        job: JobDir,
        tell: Callable[[], object] = lambda: None,
        lost_ranks: Callable[[], Collection[int]] = lambda: (),
    ) -> None:
        """``tell`` is called before a checkpoint is made in a root that was deleted, of which ``progress`` tells.

        ``lost_ranks`` is that of ``StandIn``.
        """
        self.job, self._tell = job, tell
        self.progress = DrainProgress()
        self.records = RecordCarrier(job)
        self._compile_caches = CompileCarrier(job, self._note_answer)
        self._backlog = Backlog(job)
        self._pauses = Pauses(job)
        self._unfinished = Unfinished(job)
        self._stands_in = StandIn(job, lost_ranks)
        self._thirds = ThirdSlots(job)
        self._hurries = False
        self._wishes = Asking(job.paths)
        self._wish: Mark = None
        """Mark of the newest wish that an attempt has met."""
        self._tried_at = self._retry_at = 0.0
        self._delay = _RETRY_FIRST
        self._limit_at = 0.0
        self._unread: str | None = None
        """Reason why the job's description can't be read; None when it can."""
        self._starts: Starts | None = None
        """Record of the start that writes, as it was last seen."""
        self._budget = Budget()
        """One for all ranks of the node, whose shards are carried one after the other."""

    def hurry(self, *, on: bool = True) -> None:
        """Lifts the limit on bytes per second, for the drain in hand too: somebody waits, or the node may go soon.

        With False the limit counts again. For any thread, at any moment.
        """
        self._hurries = on
        self._budget.lift(on=on)

    def tick(self) -> bool:
        """Drains the newest snapshot that should be on storage and isn't. True when one became durable.

        Records of incidents and compile caches are carried when there is no snapshot to drain.
        """
        done = self._drain_newest()
        if not done:
            with self._asking():
                if self.records.wanting():
                    self.records.carry()
                self._compile_caches.tick()
        return done

    def next_due(self) -> float | None:
        """Returns the time, by the monotonic clock, from which the newest snapshot is drained though nobody asks.

        None while each moment counts: other nodes drain too, a drain waits for something, or somebody is in a hurry.
        Raises OSError and FormatError when the job's description can't be read.
        """
        info = self.job.read_job()
        if info is None or info.host or self._hurries or self._unfinished.keys() or self._thirds.awaited:
            return None
        return self._backlog.due_at(info)

    def finish(self, deadline: float = math.inf) -> bool:
        """Carries all records and, for a bounded time, compile caches: the memory is about to be given back.

        No compile cache is carried after ``deadline``. Returns True if storage has all records.
        """
        with self._asking():
            settled = self.records.carry(last=True)
            self._compile_caches.finish(deadline)
        return settled

    @contextlib.contextmanager
    def _asking(self) -> Iterator[None]:
        """Has storage that hangs noticed, as it is in a drain."""
        self._note_answer()
        try:
            yield
        finally:
            self.progress.moved = None

    def _note_answer(self) -> None:
        self.progress.moved = time.monotonic()

    def _drain_newest(self) -> bool:
        if time.monotonic() < self._next_try():
            return False
        info = copy = None
        self._tried_at, self._wish = time.monotonic(), self._wishes.mark()
        self._note_answer()
        try:
            info = self._read_job()
            if info is None:
                return False
            self._budget.limit = info.drain_limit
            # A new one each time: all that it has to know from one drain to the next is noted in memory.
            committer = Committer(open_store(info.root), self.job, self._read_starts)
            self._ask_again(info, committer)
            copy = self._next(info, committer)
            if copy is not None and not self._hurries and not self._thirds.ready(info):
                return False  # a newer one may be chosen then
            done = self._drain(info, committer, copy) if copy is not None else self._stand_in(info, committer)
        except SupersededError as error:
            log.debug("not drained: %s", error)
            return False
        except CorruptError as error:
            self._failed(str(error), info, copy, for_good=True)
            return False
        except OSError as error:
            where = error.filename or (info.root if info is not None else self.job.path)
            self._failed(f"{where}: {describe_error(error)}", info, copy, for_good=False)
            return False
        finally:
            self.progress.step = self.progress.moved = None
        self._delay = _RETRY_FIRST
        return done

    def _next_try(self) -> float:
        """Returns the time of the next attempt: soon if a rank has asked since the last one, whatever that came to."""
        if self._retry_at > self._tried_at and self._wishes.mark() != self._wish:
            self._delay, self._retry_at = _RETRY_FIRST, min(self._retry_at, self._tried_at + _RETRY_FIRST)
        return self._retry_at

    def _read_job(self) -> JobInfo | None:
        """Returns the job's description; None without one, and while it can't be read, which is reported once.

        It is tried again soon: a trainer that runs, or the next one, writes it again.
        """
        try:
            info = self.job.read_job()
        except (OSError, FormatError) as error:
            self._retry_at = time.monotonic() + _RETRY_FIRST
            why = (
                "nothing is drained until a trainer of this node has written job.json again, which it does within a "
                f"second unless something else is in its place, to be removed: {explain(error)}"
            )
            if why != self._unread:
                log.warning("%s", why)
            self._unread = self.progress.error = why
            return None
        if self._unread is not None:
            self._unread = self.progress.error = None
        return info

    def _read_starts(self) -> Starts | None:
        """Returns the record of the start that writes: the last one seen, while somebody has removed it."""
        starts = read_starts(self.job)
        if starts is not None and starts.settled:  # else the start may be refused, and its record be taken back
            self._starts = starts
        return starts or self._starts

    def _failed(self, why: str, info: JobInfo | None, copy: StoredCopy | None, *, for_good: bool) -> None:
        """Puts the drain off, or gives a damaged snapshot up for good; frees what storage has taken of it."""
        self.progress.error = why
        self.progress.failures += 1
        if for_good and copy is not None:
            self._backlog.give_up(copy.checkpoint)
            log.error("step %d stays in memory only, as its snapshot is damaged: %s", copy.step, why)
        else:
            self._retry_at = time.monotonic() + self._delay
            log.warning("storage refused a checkpoint, memory keeps it; next try in %.1f s: %s", self._delay, why)
            self._delay = min(2 * self._delay, _RETRY_LONGEST)
        if copy is not None and info is not None:
            store = open_store(info.root)
            with contextlib.suppress(OSError):  # it refuses that as well
                if for_good:
                    store.discard(copy.stamp)
                else:
                    store.make_room(copy.stamp)

    def pending(self) -> int | None:
        """Returns the newest step in this node's memory that storage lacks; None if there is none.

        A step counts as lacking while storage has this node's shards of it only, and not where the root was deleted.
        Raises OSError when storage can't be listed.
        """
        info = self.job.read_job()
        complete = self._backlog.complete(info)[:1] if info else []
        if info is None or not complete:
            return None
        copy, store = complete[0], open_store(info.root)
        committer = Committer(store, self.job)
        newest = committer.newest(self._backlog.starts())
        if newest is None and committer.root_deleted():
            return None
        if newest is None or _goes_beyond(copy, newest):
            self._unfinished.report(store, copy.checkpoint)
            self.progress.waits = self._unfinished.problem
            return copy.step
        return None

    def _next(self, info: JobInfo, committer: Committer) -> StoredCopy | None:
        """Returns the snapshot to drain now, by what memory has and storage shows."""
        self.progress.given_up = None
        candidates = self._backlog.candidates(info, self._unfinished.keys())
        copy = self._backlog.next_of(candidates)
        if copy is None:
            return None
        trained = bool(self.job.trainers())
        newest = committer.newest(self._backlog.starts())
        if newest is not None and newest.checkpoint == copy.checkpoint:
            # Again: an agent that was killed may not have come to sync what it wrote.
            if committer.commit_if_complete(copy.stamp):
                self._became_durable(info, committer, copy.stamp)
        elif newest is None and committer.root_deleted():
            return self._for_recreated_root(info, candidates if trained else [])
        elif newest is None or _goes_beyond(copy, newest):
            return copy
        elif trained and continued_by_another(copy.incarnation, newest.incarnation):
            self._report_rival(info, newest)
        self._backlog.mark_done(copy.checkpoint)
        return None

    def _for_recreated_root(self, info: JobInfo, candidates: list[StoredCopy]) -> StoredCopy | None:
        """Returns the newest snapshot of the start that trains now: it alone goes into a root that was deleted.

        Older starts' snapshots went with the root.
        """
        ours = next((copy for copy in candidates if copy.incarnation.id == info.start), None)
        if ours is not None:
            self.progress.anew, self.progress.deleted = ours.step, self.job.notes.durable()
            self._tell()
        elif not candidates:
            self.progress.given_up = (
                f"{info.root}: was deleted; the snapshots that memory still has of it are given up when the job starts "
                f"again, or {info.idle_timeout:.0f} s after its end"
            )
        return ours

    def _report_rival(self, info: JobInfo, newest: ShardId) -> None:
        why = describe_rival(info.root, newest, "what this one saves stays in memory")
        if self.progress.error != why:
            log.warning("%s", why)
        self.progress.error = why

    def _drain(self, info: JobInfo, committer: Committer, copy: StoredCopy) -> bool:
        """Commits this node's shards of a snapshot. True when that made it durable."""
        began = time.monotonic()
        shards = [replace(copy.stamp, rank=rank) for rank in local_ranks(info, copy)]
        committer.hold_claim()
        self._write(info, committer, copy, shards)
        published = committer.commit(shards[0], shards)
        brought = self.progress.brought
        if brought is None or brought[1] != copy.incarnation.id or brought[0] < copy.step:  # an older one comes last
            self.progress.brought = copy.step, copy.incarnation.id
        self.progress.seconds = time.monotonic() - began
        with contextlib.suppress(OSError):  # memory is gone, and with it what else could be drained
            self.job.notes.write_last_drain(began, self.progress.seconds)
            self._pauses.choose(info)
        if not published:
            for withdrawn in self._unfinished.add(open_store(info.root), shards):
                self._backlog.give_up(withdrawn)  # newer ones wait, and it is not to be written again
            return False
        self.progress.drained += 1
        self._became_durable(info, committer, shards[0])
        log.debug("step %d is durable after %.2f s, %d bytes", copy.step, self.progress.seconds, self.progress.total)
        return True

    def _stand_in(self, info: JobInfo, committer: Committer) -> bool:
        """Writes a lost node's shards from their copies, if a checkpoint lacks them. True when that made it durable."""
        due = self._stands_in.due(self._unfinished.shards())
        if due is None:
            return False
        copy, shards = due
        try:
            committer.hold_claim()
            self._write(info, committer, copy, shards)
            published = committer.commit(shards[0], shards)
        except CorruptError as error:
            log.error("step %d can't be made whole on storage by copies of a lost node's part: %s", copy.step, error)
            published = False
        self._stands_in.over(copy.checkpoint)
        if published:
            log.info("step %d is durable: of what a lost node has not written, this one had copies", copy.step)
            self.progress.drained += 1
            self._became_durable(info, committer, shards[0])
            self._unfinished.remove(copy.checkpoint)
        return published

    def _write(self, info: JobInfo, committer: Committer, copy: StoredCopy, shards: list[ShardId]) -> None:
        store = open_store(info.root)
        with contextlib.ExitStack() as pins, self._timed():
            # All pinned before the first byte moves: from here on nothing that the trainers do can take the step away.
            opened = [pins.enter_context(_pin(copy, shard)) for shard in shards if not store.has_shard(shard)]
            self.progress.step, self.progress.done = copy.step, 0
            self.progress.total = sum(shard.receipt.file_bytes for shard in opened)
            for shard in opened:
                with shard.map() as source:
                    committer.write(shard.receipt, source, self._count, self._budget)

    @contextlib.contextmanager
    def _timed(self) -> Iterator[None]:
        began = time.monotonic()
        try:
            yield
        finally:
            self.progress.busy += time.monotonic() - began

    def _count(self, nbytes: int) -> None:
        self.progress.done += nbytes
        self.progress.nbytes += nbytes
        self.progress.moved = now = time.monotonic()
        if now >= self._limit_at:
            self._limit_at = now + _LIMIT_EVERY
            with contextlib.suppress(OSError, CorruptError):  # the limit stays as it was
                info = self.job.read_job()
                self._budget.limit = info.drain_limit if info is not None else self._budget.limit

    def _ask_again(self, info: JobInfo, committer: Committer) -> None:
        """Publishes what the other nodes have finished meanwhile; forgets what they have given up."""
        store = open_store(info.root)
        for shard in self._unfinished.due(store):
            try:
                published = committer.commit_if_complete(shard)
            except CorruptError as error:
                log.error("step %d stays in memory only, as its shards do not make up a whole: %s", shard.step, error)
                store.discard(shard)
                self._backlog.give_up(shard.checkpoint)
                self._unfinished.remove(shard.checkpoint)
                continue
            if published:
                self._became_durable(info, committer, shard)
                self._unfinished.remove(shard.checkpoint)
            elif not store.has_shard(shard):
                self._unfinished.remove(shard.checkpoint)  # superseded by a newer one; else it is drained again
            else:
                self._unfinished.report_if_overdue(store, shard.checkpoint)
                self.progress.waits = self._unfinished.problem

    def _became_durable(self, info: JobInfo, committer: Committer, shard: ShardId) -> None:
        """Records that a checkpoint is durable, frees the memory of ranks that have departed, and tidies storage."""
        self.progress.durable, self.progress.error, self.progress.waits = shard.step, None, None
        self._unfinished.problem = None
        self._backlog.mark_done(shard.checkpoint)
        remove_departed_ranks(self.job, shard.checkpoint)
        removed = committer.tidy(shard, info.keep, info.keep_every)
        if removed:
            log.debug("removed surplus checkpoints of steps %s", removed)


def _pin(copy: StoredCopy, shard: ShardId) -> OpenShard:
    """Opens a shard in memory and keeps the trainers from using its file again.

    Raises SupersededError where they have taken it for a newer snapshot.
    """
    try:
        opened = copy.files.shard(shard.rank, shard.world)
    except FileNotFoundError as error:
        raise SupersededError(shard, "the trainers have taken its memory for a newer one") from error
    found = opened.receipt.stamp
    if (found.checkpoint, found.rank, found.world) != (copy.checkpoint, shard.rank, shard.world):
        opened.close()
        raise SupersededError(shard, "the trainers have taken its memory for a newer one")
    return opened


def _goes_beyond(copy: StoredCopy, newest: ShardId) -> bool:
    """True if storage should get ``copy`` though it has ``newest``, which may be an older start's of the same step."""
    return newest.checkpoint < copy.checkpoint and not continued_by_another(copy.incarnation, newest.incarnation)
