"""One start of a job that saves through DCP: its place among other starts, its steps, its shards on their way."""

from __future__ import annotations

import logging
import mmap
import os
import secrets
import threading
from contextlib import suppress
from dataclasses import dataclass, replace

import torch.distributed as dist

from rekindle.errors import BusyError, MemoryStoreError, UsageError
from rekindle.format.lineage import CheckpointKey, ShardId
from rekindle.format.names import Root
from rekindle.format.receipt import Receipt
from rekindle.integrations.dcp.agree import Arrival, Offer, Ruling, Start, agree
from rekindle.integrations.dcp.away import out_of_sight
from rekindle.integrations.dcp.letters import Letter, open_box, take_box
from rekindle.memory.job import JobInfo
from rekindle.memory.job_dir import JobDir, memory_base
from rekindle.memory.lock import Lock
from rekindle.memory.room import Room
from rekindle.memory.slots import Slots
from rekindle.save.copy import ShardWriter
from rekindle.save.plan import CopyPlan
from rekindle.session.agent_keeper import AgentKeeper
from rekindle.session.finish import let_go, wait_durable
from rekindle.session.group import node_id, this_group
from rekindle.session.rendezvous import Meeting, take_place
from rekindle.session.root import warn_of_weakness
from rekindle.state.device import page_lock
from rekindle.storage.catalog import STORAGE, StoredCopy, copies_from
from rekindle.storage.checks import DELETED
from rekindle.storage.commit import Committer
from rekindle.storage.open import open_store

__all__ = ["Run", "WriterSettings", "note_loaded", "run_of", "saves_to"]

log = logging.getLogger("rekindle")

_PATIENCE = 600.0
"""Seconds that storage gets to take a checkpoint."""
_IDLE = 900.0
"""Seconds after the last trainer has gone until the agent leaves, everything being durable."""


@dataclass(frozen=True)
class WriterSettings:
    """What a writer was given besides its root."""

    keep: int | None
    drain_limit: int | None
    memory: str | None

    @property
    def retention(self) -> tuple[int, int | None]:
        """The newest so many stay, and all multiples of the second number."""
        return (1, 1) if self.keep is None else (self.keep, None)


_runs: dict[Root, Run] = {}
"""Writers of one root are one start of its job, however many a script makes."""
_loaded: dict[Root, dict[CheckpointKey, bool]] = {}
"""By root: what this process has loaded before its first save there, and whether it had asked for that very step."""


def run_of(root: Root, settings: WriterSettings) -> Run:
    """This process's start of the job that saves to ``root``. Raises BusyError where no other ranks need to know it."""
    run = _runs.get(root)
    if run is not None and run.forked:
        run = None
    if run is not None and run.world is not _world():
        run.leave()  # the ranks have been put together anew
        run = None
    if run is None:
        run = Run(root, settings)
        if run.world is None:
            this_group()
            run.join(0)
        _runs[root] = run
    if run.settings != settings:
        raise UsageError(f"{root}: this process has a writer with other settings, {run.settings}")
    return run


def saves_to(root: Root) -> bool:
    """Whether this process has begun to save there: what memory holds is then its own."""
    return root in _runs and _runs[root].begun


def note_loaded(root: Root, key: CheckpointKey, named: bool) -> None:
    """This process has loaded a checkpoint: if all ranks have, the next start of the job goes on from there."""
    if not saves_to(root):  # later ones are only looked at, as by an evaluation
        loaded = _loaded.setdefault(root, {})
        loaded[key] = named or loaded.get(key, False)


def _world() -> object:
    return dist.group.WORLD if dist.is_available() and dist.is_initialized() else None


class Run:
    """One rank's part of a start. Used by the thread that saves, and closed by any.

    The ranks of a start are those of its first save: what they have to agree on travels with DCP's plans, so that a
    rank that fails is an error on all of them, and nobody waits for a rank that doesn't save.
    """

    def __init__(self, root: Root, settings: WriterSettings) -> None:
        self.root, self.settings = root, settings
        self.world = _world()
        self.finished: ShardId | None = None
        """On the coordinator: the newest that all ranks have written their parts of."""
        self._store = open_store(root)
        self._job_dir = JobDir.of(root, memory_base(settings.memory))
        self._copier = ShardWriter()
        self._rank: int | None = None
        self._place: Lock | None = None
        self._no_memory: str | None = None
        self._slots: Slots | None = None
        self._keeper: AgentKeeper | None = None
        self._start: Start | None = None
        self._step = -1
        """The newest number that this rank knows to have been used."""
        self._newest: ShardId | None = None
        self._warned = self._reserved = False
        self._ticket = ""
        self._lock = threading.Lock()
        self._pid = os.getpid()

    @property
    def _job(self) -> JobDir | None:
        """The job's directory in memory, where it can be had."""
        return None if self._place is None else self._job_dir

    def join(self, rank: int) -> None:
        """Become that rank of the job, in this process alone. Raises BusyError when another process is it."""
        if (
            self._rank not in (None, rank) and not self.begun
        ):  # made before the process group was, or a save that failed
            if self._place is not None:
                self._place.release()
            self._place = self._rank = None
        if self._rank not in (None, rank):
            raise UsageError(
                f"{self.root}: this process has saved there as rank {self._rank}, and is rank {rank} of this save: all "
                "saves to one root are made by the same ranks; give the others a root of their own"
            )
        if self._rank is None:
            # Once there is a process group, a rank's predecessor has died long ago: it is another rank that has it.
            self._place, busy, no_memory = take_place(self._job_dir, rank, dying=self.world is None)
            if busy:
                raise BusyError(busy)
            self._no_memory = no_memory or Room().lacking(self._job_dir, 0, 1)
            self._rank = rank

    # -- agreeing on a save ------------------------------------------------------------------------------------------

    @property
    def forked(self) -> bool:
        """Whether this is a child of the process that saves: nothing of it belongs to the child."""
        return os.getpid() != self._pid

    @property
    def _mates(self) -> list[int]:
        """The ranks of this node, once this start has begun."""
        return [] if self._start is None or self._rank is None else self._start.local_ranks(self._rank)

    @property
    def begun(self) -> bool:
        """Whether it is settled what this start goes on from."""
        return self._start is not None

    def offer(self, rank: int, step: int | None, is_coordinator: bool) -> Letter:
        """What this rank brings to a save of ``step``, or of the number after the newest one. Raises BusyError."""
        if _runs.get(self.root) is not self or self.forked:
            whose = "belongs to the process that this one was forked from" if self.forked else "has been closed"
            raise UsageError(f"the writer of {self.root} {whose}: make a new one")
        self.join(rank)
        take_box(self._ticket)  # of a save that has failed
        self._ticket = secrets.token_hex(8)
        open_box(self._ticket)
        if is_coordinator:
            open_box(str(self.root))
        settings = {"keep": self.settings.keep, "drain_limit": self.settings.drain_limit}
        arrival = None if self.begun else self._arrival()
        offer = Offer(rank, self._ticket, step, self._step, settings, self._start, arrival)
        return Letter(str(self.root), offer)

    def _arrival(self) -> Arrival:
        """What this rank sees of memory and storage."""
        copies: list[StoredCopy] = []
        contents = problem = None
        storage = ""
        try:
            contents = self._store.contents()
            copies = copies_from(self._job, contents)
            if self._committer().root_deleted():
                storage = DELETED
        except OSError as error:
            problem = f"{self.root} can't be listed: {error.strerror or error}"
        unread = contents.unread if contents is not None else []
        unseen = out_of_sight(self._job, contents) if self._job is not None else 0
        if not storage and (unseen or any(copy.place == STORAGE for copy in copies)):
            storage = "in use"
        place = node_id(self._job_dir.path.parent.parent)
        return Arrival(place, self._no_memory, problem, _loaded.get(self.root, {}), copies, unread, unseen, storage)

    def settle(self, own: Letter, world: int) -> list[Letter]:
        """Settle the save that all ranks have made their offers for: the answer to each of them. On the coordinator.

        Raises UsageError, NotFoundError, NotDurableError.
        """
        own.deliver()
        offers = {offer.rank: offer for offer in take_box(str(self.root))}
        missing = [rank for rank in range(world) if rank not in offers]
        if missing:
            raise UsageError(
                f"rank(s) {missing} of {world} bring nothing to a save to {self.root}: do they save to another root, "
                "or by another writer?"
            )
        ruling = agree(self.root, [offers[rank] for rank in range(world)], self.settings.keep)
        if all(offer.start is None for offer in offers.values()):
            warn_of_weakness(self._store)
            if ruling.start.warning:
                log.warning("%s", ruling.start.warning)
        self._see_finished()
        self._step = ruling.step
        answers = [Letter(offers[rank].ticket, ruling) for rank in range(world)]
        answers[own.said.rank].deliver()
        return answers

    def stamp(self) -> ShardId:
        """What the save is known by that this rank has made an offer for. Begins the start with its first save."""
        answers = take_box(self._ticket)
        if not answers:
            raise UsageError(f"the coordinator of this save to {self.root} has not answered: is its writer another?")
        ruling: Ruling = answers[-1]
        if not self.begun:
            self._begin(ruling.start)
        assert self._rank is not None
        self._step = ruling.step
        return ShardId(ruling.step, self._rank, ruling.start.world, ruling.start.incarnation, save=ruling.save)

    def _begin(self, start: Start) -> None:
        """Go by what all ranks have agreed on."""
        rank = self._rank
        assert rank is not None
        local_ranks = start.local_ranks(rank)
        meeting = Meeting(
            start.incarnation, local_ranks, len(set(start.places)), self._place, None, True, start.anew, 0
        )
        if start.anew and self._job is not None:
            self._job.snapshots.remove(rank)  # before the note of what was deleted goes, or they would be drained
        meeting.go_on(self._job, self._store, rank, start.stored, anyway=start.anyway)
        no_memory = start.no_memory.get(start.places[rank])
        if no_memory is not None:
            self._straight_to_storage(no_memory, rank == local_ranks[0])
        elif self._slots is None:
            self._use_memory(rank, local_ranks, start)
        if start.awaited is not None:
            self.wait_durable(start.awaited, _PATIENCE)
        _loaded.pop(self.root, None)
        self._start = start

    def _use_memory(self, rank: int, local_ranks: list[int], start: Start) -> None:
        world = start.world
        if rank == local_ranks[0]:
            limit, ours = self.settings.drain_limit, start.incarnation.id
            info = JobInfo(str(self.root), local_ranks, world, *self.settings.retention, _IDLE, limit, start=ours)
            self._keeper = AgentKeeper(self._job_dir, info)
            self._keeper.check()
        self._slots = Slots(self._job_dir, rank, world, local_ranks, None, page_lock, Room().headroom(self._job_dir))
        self._slots.adopt()

    def _straight_to_storage(self, why: object, aloud: bool) -> None:
        if aloud and not self._warned:
            log.warning("checkpoints go straight to storage, which makes each save wait for it: %s", why)
        self._warned = True

    # -- writing ---------------------------------------------------------------------------------------------------

    def write(self, stamp: ShardId, plan: CopyPlan, values: bytes) -> bool:
        """Secure this rank's shard. True when it is in memory, False when it went straight to storage.

        Raises OSError when storage had to take it and doesn't.
        """
        with self._lock:
            if self._keeper is not None:
                self._keeper.check()
            self._newest = stamp
            if self._slots is not None:
                try:
                    self._to_memory(self._slots, stamp, plan, values)
                    return True
                except MemoryStoreError as error:
                    self._straight_to_storage(error, self._rank == self._mates[0])
            self._to_storage(stamp, plan, values)
            return False

    def _to_memory(self, slots: Slots, stamp: ShardId, plan: CopyPlan, values: bytes) -> None:
        slot = slots.acquire(stamp.step, stamp.incarnation, plan.layout.file_bytes)
        assert slot.map is not None
        try:
            _, sums = self._copier.write(plan, slot.map, None, stamp.step)
        except BaseException:
            slots.recover()  # threads may still be writing into the slot
            raise
        slots.commit(slot, stamp, Receipt.encode(stamp, plan.static, sums, values))
        if not self._reserved:
            self._reserved = True
            slots.reserve(plan.layout.file_bytes)  # the second save, too, finds its memory ready

    def _to_storage(self, stamp: ShardId, plan: CopyPlan, values: bytes) -> None:
        buffer = mmap.mmap(-1, plan.layout.file_bytes)
        _, sums = self._copier.write(plan, buffer, None, stamp.step)
        receipt = Receipt.decode(Receipt.encode(stamp, plan.static, sums, values), f"step {stamp.step}")
        committer = self._committer()
        committer.begin(stamp)
        committer.write(receipt, memoryview(buffer))

    def _committer(self) -> Committer:
        """Made anew each time, as a start's memory is found only when it begins."""
        return Committer(self._store, self._job)

    def finish(self, stamp: ShardId, in_memory: bool) -> None:
        """All ranks have written their parts, ``in_memory`` or some of them straight to storage. For the coordinator.

        In the second case the checkpoint is on storage when this returns; else neither store could show all of it.
        """
        self.finished = stamp
        if in_memory:
            return
        committer = self._committer()
        if not committer.commit(stamp, ()):
            self.wait_durable(stamp, _PATIENCE)  # the agent carries the shards that memory took, and publishes it
            committer.commit_if_complete(stamp)  # this node notes that, too
        with suppress(OSError):  # what is left over goes next time
            committer.tidy(stamp, *self.settings.retention)

    # -- storage ---------------------------------------------------------------------------------------------------

    def _see_finished(self) -> None:
        """Where every checkpoint is to reach storage, wait until the one before has. For the coordinator.

        The agent carries the newest one only: an older one is then safe from being passed over.
        """
        stamp, self.finished = self.finished, None
        if self.settings.keep is None and stamp is not None:
            wait_durable(stamp, self._store, self._job, self._keeper, _PATIENCE, once=True)

    def wait_durable(self, stamp: ShardId, timeout: float) -> None:
        """Return when a checkpoint is on storage. Raises NotDurableError after ``timeout`` seconds."""
        wait_durable(stamp, self._store, self._job, self._keeper, timeout)

    def _unfinished(self, stamp: ShardId) -> bool:
        """Whether a rank of this node has failed to write its part, so that nobody will carry the others'."""
        have = (
            {s.rank for s, _ in self._job.snapshots.shard_ids() if s.checkpoint == stamp.checkpoint}
            if self._job is not None
            else set()
        )
        parts = (rank in have or self._store.has_shard(replace(stamp, rank=rank)) for rank in self._mates)
        return not all(parts) and not self._store.durable(stamp)

    def close(self, timeout: float) -> None:
        """Wait until what was saved last is on storage, then give the memory back. Other ranks are not waited for.

        Raises NotDurableError after ``timeout`` seconds: the agent then goes on carrying it.
        """
        if _runs.get(self.root) is self:
            del _runs[self.root]
        durable: ShardId | None = None
        try:
            with self._lock:
                if self._newest is not None and not self._unfinished(self._newest):
                    self.wait_durable(self._newest, timeout)
                    durable = self._newest
        finally:
            self.leave(durable)

    def leave(self, durable: ShardId | None = None) -> None:
        """Let go of everything, and of the memory too if storage has what is ``durable``, and memory nothing beyond."""
        self._copier.close()
        if self._slots is not None:
            self._slots.close()
        let_go(self._job, self._keeper, self._place, self._rank or 0, self.begun, durable)
