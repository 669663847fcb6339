"""Holds one start of a job that saves through DCP: its agreement with the other ranks, its steps, its shards.

Joining, leaving and going on from earlier starts is ``rekindle.session.session``'s; here it is wrapped for ranks that
agree by what travels with DCP's plans.
"""

from __future__ import annotations

import logging
import mmap
import os
import secrets
import threading
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import FrameType
from typing import Any

import torch.distributed as dist

from rekindle.errors import BusyError, MemoryStoreError, UsageError
from rekindle.faults.imports import ImportRecord
from rekindle.faults.torchelastic import introduce, tell_of_uncaught_errors
from rekindle.format.lineage import CheckpointKey, ShardId
from rekindle.format.names import Root
from rekindle.format.receipt import Receipt
from rekindle.integrations.dcp.agree import Arrival, SaveDecision, SaveRequest, Start, agree
from rekindle.integrations.dcp.messages import Message, open_box, take_box
from rekindle.memory.job import JobInfo
from rekindle.memory.job_dir import JobDir
from rekindle.memory.room import Room
from rekindle.memory.slots import Slots
from rekindle.save.copy import ShardWriter
from rekindle.save.plan import CopyPlan
from rekindle.session.group import this_group
from rekindle.session.inventory import take_inventory
from rekindle.session.recovery import RecoveryClock
from rekindle.session.residence import residence_of
from rekindle.session.root_check import warn_of_capability
from rekindle.session.session import Session
from rekindle.storage.commit import Committer

__all__ = ["DcpSession", "WriterSettings", "note_loaded", "rank_of", "saves_to", "session_of"]

log = logging.getLogger("rekindle")

_PATIENCE = 600.0
"""Seconds that storage gets to take a checkpoint."""
_IDLE = 900.0
"""Seconds after the last trainer has gone until the agent leaves, everything being durable."""


@dataclass(frozen=True)
class WriterSettings:
    """Settings of a writer, besides its root."""

    keep: int | None
    drain_limit: int | None
    memory: str | None

    @property
    def retention(self) -> tuple[int, int | None]:
        """Number of the newest checkpoints that stay, and the number whose multiples do."""
        return (1, 1) if self.keep is None else (self.keep, None)


_sessions: dict[Root, DcpSession] = {}
"""Writers of one root are one start of its job, however many a script makes."""
_loaded: dict[Root, dict[CheckpointKey, bool]] = {}
"""By root: checkpoints that this process has loaded before its first save; True where it asked for that very step."""


def session_of(root: Root, settings: WriterSettings) -> DcpSession:
    """Returns this process's start of the job that saves to ``root``.

    Raises BusyError if another process is that rank, where no other ranks need to know it.
    """
    session = _sessions.get(root)
    if session is not None and session.forked:
        session = None
    if session is not None and session.process_group is not _process_group():
        session.leave()  # the ranks have been put together anew
        session = None
    if session is None:
        session = DcpSession(root, settings)
        if session.process_group is None:
            this_group()
            session.take_place(0)
        _sessions[root] = session
    if session.settings != settings:
        raise UsageError(f"{root}: this process has a writer with other settings, {session.settings}")
    return session


def saves_to(root: Root) -> bool:
    """Returns True if this process has begun to save there: what memory holds is then its own."""
    return root in _sessions and _sessions[root].begun


def note_loaded(root: Root, key: CheckpointKey, *, named: bool) -> None:
    """Notes a checkpoint that this process has loaded: the next start goes on from there, if all ranks have loaded it.

    It was ``named`` if its very step was asked for.
    """
    if not saves_to(root):  # later ones are only looked at, as by an evaluation
        loaded = _loaded.setdefault(root, {})
        loaded[key] = named or loaded.get(key, False)


def rank_of(options: Mapping[str, Any], caller: FrameType) -> int:
    """Returns the rank in the process group of this save or load, which is 0 for a process alone.

    DCP tells it since torch 2.9. Before, only its own function knows it, from which it calls.
    """
    if "rank" in options:
        return int(options["rank"])
    return int(getattr(caller.f_locals.get("distW"), "rank", 0))


def _process_group() -> object:
    return dist.group.WORLD if dist.is_available() and dist.is_initialized() else None


class DcpSession:
    """One rank's part of a start that saves through DCP. Used by the thread that saves, and closed by any.

    The ranks of a start are those of its first save: what they have to agree on travels with DCP's plans, so that a
    rank that fails is an error on all of them, and nobody waits for a rank that doesn't save.
    """

    def __init__(self, root: Root, settings: WriterSettings) -> None:
        tell_of_uncaught_errors()
        self.root, self.settings = root, settings
        self.process_group = _process_group()
        self.finished: ShardId | None = None
        """On the coordinator: the newest checkpoint that all ranks have written their parts of."""
        self._session = Session(root, settings.memory)
        self._store = self._session.store
        self._copier = ShardWriter()
        self._imports = ImportRecord()
        self._clock: RecoveryClock | None = None
        self._start: Start | None = None
        self._step = -1
        """Newest number that this rank knows to have been used."""
        self._newest: ShardId | None = None
        self._warned = self._reserved = False
        self._ticket = ""
        self._lock = threading.Lock()
        self._pid = os.getpid()

    def take_place(self, rank: int) -> None:
        """Becomes that rank of the job, in this process alone. Raises BusyError when another process is it."""
        session = self._session
        if session.rank not in (None, rank) and not self.begun:
            session.release_place()  # made before the process group was; or a save has failed
        if session.rank not in (None, rank):
            raise UsageError(
                f"{self.root}: this process has saved there as rank {session.rank}, and is rank {rank} of this save: "
                "all saves to one root are made by the same ranks; give the others a root of their own"
            )
        if session.rank is None:
            # Once there is a process group, a rank's predecessor has died long ago: it is another rank that has it.
            busy = session.take_place(rank, predecessor_may_live=self.process_group is None)
            if busy:
                session.release_place()
                raise BusyError(busy)
            session.no_memory = session.no_memory or Room().describe_shortage(session.job_dir, 0, 1)

    # -- agreeing on a save ------------------------------------------------------------------------------------------

    @property
    def forked(self) -> bool:
        """True in a child of the process that saves: nothing of this belongs to the child."""
        return os.getpid() != self._pid

    @property
    def begun(self) -> bool:
        """True once all ranks know what this start goes on from."""
        return self._start is not None

    def request(self, rank: int, step: int | None, is_coordinator: bool) -> Message:
        """Prepares this rank's request to save ``step``, or the number after the newest one. Raises BusyError."""
        if _sessions.get(self.root) is not self or self.forked:
            whose = "belongs to the process that this one was forked from" if self.forked else "has been closed"
            raise UsageError(f"the writer of {self.root} {whose}: make a new one")
        self.take_place(rank)
        take_box(self._ticket)  # of a save that has failed
        self._ticket = secrets.token_hex(8)
        open_box(self._ticket)
        if is_coordinator:
            open_box(str(self.root))
        settings = {"keep": self.settings.keep, "drain_limit": self.settings.drain_limit}
        arrival = None if self.begun else self._arrive(rank)
        return Message(
            str(self.root), SaveRequest(rank, self._ticket, step, self._step, settings, self._start, arrival)
        )

    def _arrive(self, rank: int) -> Arrival:
        """Looks at memory and storage, before this start has begun."""
        session = self._session
        inventory = take_inventory(session.job, session.store, rank)
        return Arrival(residence_of(session), session.no_memory, _loaded.get(self.root, {}), inventory)

    def decide(self, own: Message, world: int) -> list[Message]:
        """Decides on the save that all ranks have made their requests for. On the coordinator.

        Returns the answer to each. Raises UsageError, NotFoundError, NotDurableError.
        """
        own.deliver()
        requests: dict[int, SaveRequest] = {request.rank: request for request in take_box(str(self.root))}
        missing = [rank for rank in range(world) if rank not in requests]
        if missing:
            raise UsageError(
                f"rank(s) {missing} of {world} have sent no request for a save to {self.root}, and save to "
                "another root perhaps, or by another writer: give all ranks a RekindleWriter of that root"
            )
        decision = agree(self.root, [requests[rank] for rank in range(world)], self.settings.keep)
        if all(request.start is None for request in requests.values()):
            warn_of_capability(self._store)
            if decision.start.warning:
                log.warning("%s", decision.start.warning)
        self._wait_for_finished()
        self._step = decision.step
        answers = [Message(requests[rank].ticket, decision) for rank in range(world)]
        answers[own.content.rank].deliver()
        return answers

    def shard_id(self) -> ShardId:
        """Names the shard that this rank has requested to save. Begins the start with its first save."""
        answers = take_box(self._ticket)
        if not answers:
            raise UsageError(
                f"the coordinator of this save to {self.root} has not answered: give it a RekindleWriter of that root"
            )
        decision: SaveDecision = answers[-1]
        if not self.begun:
            self._begin(decision.start)
        self._step = decision.step
        return self._session.shard_id(decision.step, save=decision.save)

    def _begin(self, start: Start) -> None:
        """Goes by what all ranks have agreed on, from here on."""
        session = self._session
        assert session.rank is not None
        meeting = start.meeting(session.rank)
        session.join(meeting)
        self._clock = self._clock or RecoveryClock(session)
        introduce(session.job_dir, self.root)
        session.go_on_from(start.base, start.stored, chosen=start.chosen, back=start.back)
        self._clock.went_on_from(0 if start.base is None else start.base.step)
        if meeting.no_memory is not None:
            self._warn_of_direct_saves(meeting.no_memory)
        elif session.slots is None:
            limit, ours = self.settings.drain_limit, start.incarnation.id
            local_ranks, retention = meeting.local_ranks, self.settings.retention
            info = JobInfo(str(self.root), local_ranks, meeting.world, *retention, _IDLE, limit, start=ours)
            session.open_memory(info, Room())
        if start.awaited is not None:
            self.wait_durable(start.awaited, _PATIENCE)
        _loaded.pop(self.root, None)
        self._start = start

    def _warn_of_direct_saves(self, why: object) -> None:
        if self._session.is_first_on_node and not self._warned:
            log.warning("checkpoints go straight to storage, which makes each save wait for it: %s", why)
        self._warned = True

    # -- writing ---------------------------------------------------------------------------------------------------

    def write(self, stamp: ShardId, plan: CopyPlan, values: bytes) -> bool:
        """Secures this rank's shard. True when it is in memory, False when it went straight to storage.

        Raises OSError when storage had to take it and doesn't.
        """
        with self._lock:
            self._session.check_agent()
            self._newest = stamp
            in_memory = self._secure(stamp, plan, values)
            self._imports.write()
            if self._clock is not None:
                self._clock.stepped(stamp.step)
            return in_memory

    def _secure(self, stamp: ShardId, plan: CopyPlan, values: bytes) -> bool:
        if self._session.slots is not None:
            try:
                self._to_memory(self._session.slots, stamp, plan, values)
                return True
            except MemoryStoreError as error:
                self._warn_of_direct_saves(error)
        self._to_storage(stamp, plan, values)
        return False

    @property
    def _job(self) -> JobDir | None:
        """The job's directory in memory, where it can be had."""
        return self._session.job

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
        """Makes a committer. Anew each time, as a start's memory is found only when it begins."""
        return Committer(self._store, self._job)

    def finish(self, stamp: ShardId, in_memory: bool) -> None:
        """Finishes a save of which all ranks have written their parts. On the coordinator.

        They are ``in_memory``, or some of them went straight to storage. In the second case the checkpoint is on
        storage when this returns; else neither store could show all of it.
        """
        self.finished = stamp
        if in_memory:
            return
        committer = self._committer()
        if not committer.commit(stamp, ()):
            self.wait_durable(stamp, _PATIENCE)  # the agent carries the shards that memory took, and publishes it
            committer.commit_if_complete(stamp)  # this node notes that, too
        committer.tidy(stamp, *self.settings.retention)

    # -- storage ---------------------------------------------------------------------------------------------------

    def _wait_for_finished(self) -> None:
        """Waits until the checkpoint before has reached storage, where every one is to. On the coordinator.

        The agent carries the newest one only. So an older one can't be passed over.
        """
        stamp, self.finished = self.finished, None
        if self.settings.keep is None and stamp is not None:
            self._session.wait_durable(stamp, _PATIENCE, once=True)

    def wait_durable(self, stamp: ShardId, timeout: float) -> None:
        """Returns when a checkpoint is on storage. Raises NotDurableError after ``timeout`` seconds."""
        self._session.wait_durable(stamp, timeout)

    def _unfinished(self, stamp: ShardId) -> bool:
        """Returns True if a rank of this node has failed to write its part, so that nobody will carry the others'."""
        have = (
            {s.rank for s, _ in self._job.snapshots.shard_ids() if s.checkpoint == stamp.checkpoint}
            if self._job is not None
            else set()
        )
        parts = (rank in have or self._store.has_shard(replace(stamp, rank=rank)) for rank in self._session.local_ranks)
        return not all(parts) and not self._store.durable(stamp)

    def close(self, timeout: float) -> None:
        """Waits until what was saved last is on storage, then gives the memory back. Doesn't wait for other ranks.

        Raises NotDurableError after ``timeout`` seconds: the agent then goes on carrying it.
        """
        if _sessions.get(self.root) is self:
            del _sessions[self.root]
        durable: ShardId | None = None
        try:
            with self._lock:
                if self._newest is not None and not self._unfinished(self._newest):
                    self.wait_durable(self._newest, timeout)
                    durable = self._newest
                    if self._clock is not None:
                        self._clock.ended(durable.step)
        finally:
            self.leave(durable)

    def leave(self, durable: ShardId | None = None) -> None:
        """Lets go of everything, and of the memory too if storage has what is ``durable``, and memory nothing
        beyond."""
        self._copier.close()
        self._session.leave(durable)
