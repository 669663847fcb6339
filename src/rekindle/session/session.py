"""Holds one rank's part in one start of a job, from taking its place until it leaves. Every writer has one.

A start goes through these steps, in this order:

1. ``take_place``: the rank's lock in the memory store makes this process its only trainer. An earlier session of this
   process gives way; a dying predecessor is waited for.
2. The ranks agree on a ``Meeting``: by collectives (``rekindle.session.rendezvous``), or in another way, as
   torch.distributed.checkpoint's plans are.
3. ``join``: from here on the session goes by what was agreed.
4. ``open_memory``: one rank of each node starts the agent, and each takes over its files in the memory store.
5. ``go_on_from``: it is known what this start continues. Only now may notes of earlier starts be replaced: a start that
   ends before, because storage is away, has to leave them to the next one.
6. ``leave``: the agent is left to itself, the lock is released, and memory is given back if storage has everything.
"""

from __future__ import annotations

import gc
import logging
import os
import time
import weakref
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from rekindle.common.os_errors import describe_error
from rekindle.devices.page_lock import PageLocker
from rekindle.errors import BusyError, MemoryStoreError
from rekindle.format.claim import Starts
from rekindle.format.lineage import CheckpointKey, Incarnation, ShardId
from rekindle.format.names import Root
from rekindle.memory.clean_up import remove_superfluous
from rekindle.memory.job import JobInfo
from rekindle.memory.job_dir import JobDir, memory_base
from rekindle.memory.lock import Lock
from rekindle.memory.nodes import Nodes
from rekindle.memory.room import Room
from rekindle.memory.slots import Slots
from rekindle.memory.thirds import Thirds
from rekindle.session.agent_keeper import AgentKeeper
from rekindle.session.claiming import Stake, claim_again, record_starts
from rekindle.session.finish import carry_rest, wait_durable, wait_for_agent
from rekindle.storage.checks import root_identity
from rekindle.storage.open import open_store

__all__ = ["GIVE_WAY", "Meeting", "Session"]

log = logging.getLogger("rekindle")

GIVE_WAY = 10.0
"""Seconds that a save without memory gets to reach storage before a later trainer begins behind it."""
_FINISH, _GIVE_UP = 60.0, 1.0
"""Seconds for a drain in hand at the end, of something older than the durable checkpoint; and where there is none."""
_SOON, _DYING = 2.0, 30.0
"""Seconds that a restarted rank waits for its dying predecessor, without and with a word of that."""

_trainers: dict[tuple[Path, int], weakref.WeakMethod[Callable[[], str | None]]] = {}
"""By directory of the job and rank: the method that makes this process's trainer of that rank give way."""


@dataclass(frozen=True)
class Meeting:
    """The agreement of the ranks of a start."""

    incarnation: Incarnation
    world: int
    local_ranks: list[int]
    """Ranks on this node, in order."""
    nodes: int
    no_memory: str | None
    """Reason why snapshots can't go into this node's memory; None when they can. What is there may still be
    readable."""
    found: bool
    """True if any rank sees a checkpoint of an earlier start, or a note of one, or can't look."""
    deleted: bool
    """True if all that an earlier start had on storage was deleted: what memory still has of it counts no more."""
    nbytes: int = 0
    """Estimated size of this rank's snapshot."""
    stake: Stake | None = None
    """Claim of the root, or why there is none; None for a start that makes no claims."""


class Session:
    """One rank's part in one start of a job. Its methods are not collectives.

    Used by one thread at a time. It may be left more than once, and holds nothing then.
    """

    def __init__(self, root: Root, memory: str | os.PathLike[str] | None) -> None:
        """``memory``: directory of the memory store; None for the default."""
        self.root = root
        self.store = open_store(root)
        self.job_dir = JobDir.of(root, memory_base(memory))
        """The job's directory in the memory store, whether it can be had or not."""
        self.rank: int | None = None
        self.lock: Lock | None = None
        """Makes this process the rank's only trainer; None where even the job's directory can't be had."""
        self.no_memory: str | None = None
        """Reason why there is no memory store, as far as this rank knows; None when there is one."""
        self.meeting: Meeting | None = None
        self.keeper: AgentKeeper | None = None
        """On one rank of each node that has a memory store."""
        self.slots: Slots | None = None
        """None where snapshots don't go into memory."""
        self.nodes: Nodes | None = None
        """All nodes, as far as they reach each other; None on a single one."""
        self._copies = False
        """True if nodes are to keep copies of each other's snapshots."""
        self.begun = False
        """True once it is known what this start goes on from."""
        self.joined = 0.0
        """Time at which it joined, by this node's monotonic clock, in seconds."""
        self.starts: Starts | None = None
        """This start, by whose claim it writes to the root, and earlier ones; None for one without claims."""
        self._incarnation: Incarnation | None = None

    # -- joining -------------------------------------------------------------------------------------------------

    def take_place(self, rank: int, *, predecessor_may_live: bool = True) -> str | None:
        """Becomes ``rank`` of the job. Returns a message if another trainer has its place and keeps it.

        It is returned, not raised, so that all ranks can be told before any raises. ``predecessor_may_live``: an
        earlier process of this rank may still be dying, and is waited for.
        """
        self.rank = rank
        refusal = self._ask_to_give_way(rank)
        if refusal is not None:
            return refusal
        try:
            self.lock = self._lock_rank(rank, predecessor_may_live=predecessor_may_live)
        except BusyError as error:
            return str(error)
        except MemoryStoreError as error:
            self.no_memory = str(error)
        except OSError as error:
            self.no_memory = f"memory store {self.job_dir.path}: {describe_error(error)}"
        return None

    def _ask_to_give_way(self, rank: int) -> str | None:
        """Asks an earlier trainer of this process to go, as when a notebook's cell runs again. Returns why it can't."""
        known = _trainers.get((self.job_dir.path, rank))
        give_way = known() if known is not None else None
        return give_way() if give_way is not None else None

    def _lock_rank(self, rank: int, *, predecessor_may_live: bool) -> Lock:
        path = self.job_dir.paths.rank_lock(rank)
        if Lock.holder(path) == os.getpid():
            gc.collect()  # nobody but garbage may be left of it, such as what a traceback held
        end_it = "end it, or give this job a root of its own"
        try:
            return self.job_dir.lock_rank(rank, _SOON)
        except BusyError as error:
            if Lock.holder(path) == os.getpid():
                raise BusyError(
                    f"process {os.getpid()}, which is this one, trains rank {rank} of this root already: call close() "
                    "there first"
                ) from None
            if not predecessor_may_live:
                raise BusyError(f"{error}: {end_it}") from None
            log.warning("%s; waiting %.0f s for it to end", error, _DYING)
        try:
            return self.job_dir.lock_rank(rank, _DYING)
        except BusyError as error:
            raise BusyError(f"{error}: {end_it}") from None

    def release_place(self) -> None:
        """Lets go of the place, before anything was done in it."""
        if self.lock is not None:
            self.lock.release()
        self.lock = self.rank = None

    def join(self, meeting: Meeting) -> None:
        """Goes by what all ranks have agreed on, from here on."""
        self.meeting, self._incarnation, self.joined = meeting, meeting.incarnation, time.monotonic()
        self.starts = meeting.stake.starts if meeting.stake is not None else None

    def on_takeover(self, give_way: Callable[[], str | None]) -> None:
        """Registers the bound method ``give_way``, to be called when a later trainer of this process wants the place.

        It lets go of the place for good, without waiting for storage, or returns the reason if it can't do that now. It
        is held weakly, and may have let go before.
        """
        assert self.rank is not None
        _trainers[self.job_dir.path, self.rank] = weakref.WeakMethod(give_way)

    # -- once it has joined ----------------------------------------------------------------------------------------

    @property
    def agreed(self) -> Meeting:
        """The agreement of the ranks, once the session has joined."""
        assert self.meeting is not None, "the session has not joined"
        return self.meeting

    @property
    def incarnation(self) -> Incarnation:
        """The id of this start, and what it goes on from."""
        assert self._incarnation is not None, "the session has not joined"
        return self._incarnation

    @property
    def local_ranks(self) -> list[int]:
        """Ranks on this node, in order; none before the session has joined."""
        return [] if self.meeting is None else self.meeting.local_ranks

    @property
    def is_first_on_node(self) -> bool:
        """True on the one rank of each node that speaks and acts for all of them."""
        return bool(self.local_ranks) and self.rank == self.local_ranks[0]

    @property
    def is_in_whole_mesh(self) -> bool:
        """True if the agents of all nodes of a start on several reach each other, as all ranks have agreed."""
        return self.nodes is not None and all(node.port for node in self.nodes.nodes)

    @property
    def job(self) -> JobDir | None:
        """The job's directory in the memory store; None where it can't be had."""
        return None if self.lock is None else self.job_dir

    def shard_id(self, step: int, *, persist: bool = True, save: str = "") -> ShardId:
        """Names this rank's shard of ``step``."""
        assert self.rank is not None
        return ShardId(step, self.rank, self.agreed.world, self.incarnation, persist, save)

    # -- memory ------------------------------------------------------------------------------------------------------

    def open_memory(
        self,
        info: JobInfo,
        room: Room,
        fallback_after: float = 10.0,
        agent_changed: Callable[[bool], object] = lambda there: None,
        devices: Collection[torch.device] = (),
    ) -> Slots:
        """Starts the agent, on one rank of each node, and takes over what an earlier process of this rank left.

        ``info`` is what the agent needs to know; see ``AgentKeeper`` for the two after ``room``. ``devices`` are those
        that copy into the memory, as far as that is known.
        """
        assert self.rank is not None
        self._copies = info.peer_every is not None
        if self.is_first_on_node:
            self.keeper = AgentKeeper(self.job_dir, info, fallback_after, agent_changed)
            self.keeper.check()
        limit, headroom = room.limit_per_rank(len(self.local_ranks)), room.headroom(self.job_dir)
        locker = PageLocker(devices)
        self.slots = Slots(
            *(self.job_dir, self.rank, self.agreed.world, self.local_ranks, limit),
            page_lock=locker.lock,
            numa_node=locker.numa_node(),
            headroom=headroom,
        )
        self.slots.adopt()
        return self.slots

    def reserve(self, nbytes: int) -> None:
        """Has memory made for the first snapshots of so many bytes: on several nodes also for those kept for others."""
        if self.slots is not None:
            self.slots.reserve(nbytes, 4 if self._copies and self.is_in_whole_mesh else 2, ahead=True)
            with suppress(OSError):
                Thirds(self.job_dir.paths).write_made(self.incarnation.id)

    def check_agent(self) -> None:
        """Looks after the agent, if that is this rank's task. Never waits for it."""
        if self.keeper is not None:
            self.keeper.check()

    # -- lineage -----------------------------------------------------------------------------------------------------

    def go_on_from(
        self,
        base: CheckpointKey | None,
        stored: int | None,
        *,
        chosen: bool = False,
        back: bool = False,
        seen_generation: int = 0,
    ) -> None:
        """Continues ``base``, or begins from nothing: names it as the parent of this start, and notes that on this
        node.

        ``stored`` is the newest step that storage has of it. It was ``chosen`` if a person named its step. ``back``: it
        is of a run that was deleted, and is there again. ``seen_generation`` is the highest that ranks have seen since
        they met, when storage may have been away.

        Raises BusyError on all ranks, unless it was ``chosen``, where the job goes on elsewhere already.
        """
        self._settle_claim(chosen=chosen, used=stored is not None)
        generation = max(self.incarnation.generation, 1 + seen_generation)
        if self.agreed.deleted if base is None else back:
            self._give_up_memory()
        if self.job is not None and self.is_first_on_node:
            with suppress(OSError):
                self._note_run(self.job, generation, base, chosen=chosen, back=back)
            with suppress(OSError):
                self._note_stored(self.job, stored, forget=chosen or base is None)
        parent, step = (base.incarnation.id, base.step) if base is not None else ("", 0)
        self._incarnation = replace(self.incarnation, generation=generation, parent=parent, parent_step=step)
        self.begun = True

    def _settle_claim(self, *, chosen: bool, used: bool) -> None:
        """Claims the root where the meeting could not: storage was away, or a person has to decide.

        ``used``: storage has checkpoints.
        """
        stake = self.agreed.stake
        if stake is None or stake.starts.own.number or self.begun:
            return
        if stake.refusal is not None and not chosen:
            raise BusyError(stake.refusal)
        if self.rank == 0:
            self.starts = claim_again(self.store, stake.starts, used=used, on_purpose=chosen)
        if self.is_first_on_node:
            record_starts(self.job, self.starts)

    def _give_up_memory(self) -> None:
        """Frees what memory has of a run that was deleted, before the note of it goes: else it would be drained."""
        with suppress(OSError):  # memory that fails: the first save will say so
            if self.slots is not None:
                self.slots.free_all()
            elif self.job is not None:
                self.job.snapshots.remove(self.rank)
            if self.job is not None:
                self.job.copies.snapshots.remove_shards()

    def _note_run(self, job: JobDir, generation: int, base: CheckpointKey | None, *, chosen: bool, back: bool) -> None:
        """Notes that this start begins anew only because all was deleted; or which of two runs was chosen since."""
        anew = job.notes.fresh_start()
        if base is None and not chosen and self.agreed.deleted:
            job.notes.write_fresh_start(generation)
        elif anew is not None and (chosen or base is None or back):
            job.notes.write_fresh_start(anew[0], generation if base is None or back else base.incarnation.generation)

    def _note_stored(self, job: JobDir, stored: int | None, *, forget: bool) -> None:
        """Notes the newest step on storage. Where storage shows nothing, the old note stays, unless it is to go."""
        if stored is not None:
            job.notes.write_durable(stored, root_identity(self.store, stored))
        elif forget:
            job.notes.forget_durable()

    # -- ending ------------------------------------------------------------------------------------------------------

    def wait_durable(
        self, stamp: ShardId, seconds: float, *, once: bool = False, local_ranks: Collection[int] = ()
    ) -> None:
        """Returns when a checkpoint is on storage. Raises NotDurableError after ``seconds``. See ``finish``."""
        if self.slots is not None:
            with suppress(OSError):  # no save comes meanwhile, so the drain needn't wait for a third slot
                Thirds(self.job_dir.paths).write_made(self.incarnation.id, refused=True)
        wait_durable(stamp, self.store, self.job, self.keeper, seconds, local_ranks, once=once)

    def leave(self, durable: ShardId | None = None) -> None:
        """Leaves the job, and gives memory back if storage has what is ``durable``, and memory nothing beyond it.

        A start that has not begun, because storage didn't show what was there, leaves the note of it to the next one.
        """
        job, rank = self.job, self.rank or 0
        if self.slots is not None:
            self.slots.close()
        saved = durable is not None and (job is None or remove_superfluous(job, rank, durable.checkpoint))
        if self.keeper is not None:
            self.keeper.close(_FINISH if saved else _GIVE_UP)
        # An agent without a description of the job, as guard() starts where memory has no room, only tells of faults:
        # it knows no storage to prune, and stays for a minute. Looked at now: once this rank has left, an agent that
        # has one removes it.
        described = job is not None and job.paths.job.exists()
        if self.lock is not None:
            self.lock.release()
        if job is None or (not self.begun and job.notes.durable() is not None):
            return
        if saved and described:
            wait_for_agent(job)
        if job.agent() is None and (saved or not any(job.snapshots.shard_ids())):
            if described and job.path.exists() and not job.trainers():
                carry_rest(job)
            job.remove()  # else the agent does it, once the last rank has left
