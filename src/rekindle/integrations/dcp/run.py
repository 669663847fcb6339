"""One start of a job that saves through DCP: its place among other starts, its steps, its shards on their way."""

from __future__ import annotations

import logging
import mmap
import os
import threading
from contextlib import suppress
from dataclasses import dataclass, replace

import torch.distributed as dist

from rekindle.agent.ending import let_go, wait_durable
from rekindle.agent.spawn import AgentKeeper
from rekindle.errors import MemoryStoreError, NotFoundError, UsageError
from rekindle.integrations.dcp.away import gone, on_purpose, out_of_sight
from rekindle.recovery.group import this_group
from rekindle.recovery.meet import meet
from rekindle.snapshot.documents import Receipt
from rekindle.snapshot.lineage import Incarnation, Stamp, live
from rekindle.snapshot.memory import Job, JobDir, memory_base
from rekindle.snapshot.names import LAST_STEP, Root
from rekindle.snapshot.slots import Slots
from rekindle.state.copy import ShardWriter
from rekindle.state.device import page_lock
from rekindle.state.plan import Plan
from rekindle.storage.catalog import MEMORY, STORAGE, Copy, copies_in, newest_stored, refuse_behind
from rekindle.storage.standing import newest_on, refuse_elsewhere
from rekindle.storage.stores import open_store

__all__ = ["Key", "Run", "Settings", "note_loaded", "run_of"]

log = logging.getLogger("rekindle")

_PATIENCE = 600.0
"""Seconds that storage gets to take a checkpoint."""
_IDLE = 900.0
"""Seconds after the last trainer has gone until the agent leaves, everything being durable."""

Key = tuple[int, Incarnation]


@dataclass(frozen=True)
class Settings:
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
_loaded: dict[Root, dict[Key, bool]] = {}
"""By root: what this process has loaded before its first save there, and whether it had asked for that very step."""


def run_of(root: Root, settings: Settings) -> Run:
    """This process's start of the job that saves to ``root``. A collective of all ranks when it is the first one."""
    run = _runs.get(root)
    if run is not None and run.forked:
        run = None
    if run is not None and run.world is not _world():
        run.leave()  # the ranks have been put together anew
        run = None
    if run is None:
        run = _runs[root] = Run(root, settings)
    if run.settings != settings:
        raise UsageError(f"{root}: this process has a writer with other settings, {run.settings}")
    return run


def note_loaded(root: Root, key: Key, named: bool) -> None:
    """This process has loaded a checkpoint: if all ranks have, the next start of the job goes on from there."""
    if root not in _runs or not _runs[root].begun:  # later ones are only looked at, as by an evaluation
        loaded = _loaded.setdefault(root, {})
        loaded[key] = named or loaded.get(key, False)


def _world() -> object:
    return dist.group.WORLD if dist.is_available() and dist.is_initialized() else None


class Run:
    """One rank's part of a start. Made by all ranks; used by the thread that saves, and closed by any."""

    def __init__(self, root: Root, settings: Settings) -> None:
        self.root, self.settings = root, settings
        self.world = _world()
        self.group = this_group(apart=True)  # saves may be made by a thread, while training uses the default group
        self.finished: Stamp | None = None
        """On the coordinator: the newest that all ranks have written their parts of."""
        self._store = open_store(root)
        self._meeting = meet(
            self.group,
            job := JobDir.of(root, memory_base(settings.memory)),
            root,
            lambda mates: 0,  # nobody knows yet; a save that doesn't fit goes straight to storage
            None,
            {"keep": settings.keep, "drain_limit": settings.drain_limit},
        )
        self._job = job if self._meeting.lock is not None else None
        self._copier = ShardWriter()
        self._slots: Slots | None = None
        self._keeper: AgentKeeper | None = None
        self._incarnation: Incarnation | None = None
        self._step = -1
        self._newest: Stamp | None = None
        self._warned = self._reserved = False
        self._lock = threading.Lock()
        self._pid = os.getpid()
        if self._meeting.no_memory is None:
            self._use_memory(job)
        else:
            self._straight_to_storage(self._meeting.no_memory)

    def _use_memory(self, job: JobDir) -> None:
        mates, rank = self._meeting.mates, self.group.rank
        if rank == mates[0]:
            limit = self.settings.drain_limit
            info = Job(str(self.root), mates, self.group.world, *self.settings.retention, _IDLE, limit)
            self._keeper = AgentKeeper(job, info)
            self._keeper.check()
        self._slots = Slots(job, rank, self.group.world, mates, None, page_lock)
        self._slots.adopt()

    def _straight_to_storage(self, why: object) -> None:
        if not self._warned and self.group.rank == self._meeting.mates[0]:
            log.warning("checkpoints go straight to storage, which makes each save wait for it: %s", why)
        self._warned = True

    # -- which step ------------------------------------------------------------------------------------------------

    @property
    def forked(self) -> bool:
        """Whether this is a child of the process that saves: nothing of it belongs to the child."""
        return os.getpid() != self._pid

    @property
    def begun(self) -> bool:
        """Whether it is settled what this start goes on from."""
        return self._incarnation is not None

    def stamp(self, step: int | None) -> Stamp:
        """What the next save, of ``step`` or of the number after the newest one, is known by. All ranks ask alike.

        A collective the first time. Raises UsageError for a step that is not newer than all there are.
        """
        if _runs.get(self.root) is not self or self.forked:
            whose = "belongs to the process that this one was forked from" if self.forked else "has been closed"
            raise UsageError(f"the writer of {self.root} {whose}: make a new one")
        if self._incarnation is None:
            self._begin()
        assert self._incarnation is not None
        number = max(self._step + 1, 1) if step is None else step
        if not 0 <= number <= LAST_STEP:
            raise UsageError(f"step {number}: must be a whole number of 0 to {LAST_STEP}")
        if number <= self._step:
            raise UsageError(
                f"step {number} after step {self._step} in {self.root}: steps must grow, for no checkpoint is written "
                "over. To go back to an older one, load it in a new process before the first save; to begin anew, "
                "use a new root"
            )
        self._step = number
        return Stamp(number, self.group.rank, self.group.world, self._incarnation)

    def _begin(self) -> None:
        """Agree on what this start goes on from: the newest that all ranks have loaded, else the newest there is."""
        copies: list[Copy] = []
        unread: list[tuple[int, str]] = []
        problem = None
        try:
            contents = self._store.contents()
            copies, unread = copies_in(self._job, contents), contents.unread
        except OSError as error:
            problem = f"{self.root} can't be listed: {error.strerror or error}"
        unseen = out_of_sight(self.root, self._job) if self._job is not None else 0
        views = self.group.gather((problem, _loaded.get(self.root, {}), copies, unseen, unread))
        for trouble in (view[0] for view in views if view[0]):
            raise NotFoundError(trouble)
        copies = [copy for view in views for copy in view[2]]
        ranks: dict[Key, set[int]] = {}
        for copy in live(copies):
            ranks.setdefault(copy.key, set()).update(copy.ranks)
        whole = [copy.key for copy in copies if ranks.get(copy.key, set()).issuperset(range(copy.world))]
        loaded = set.intersection(*(set(view[1]) for view in views))
        base = max(loaded, default=None) or max(whole, default=None)
        named = base is not None and all(view[1].get(base) for view in views)
        if not named:
            step = base[0] if base is not None else 0
            refuse_behind(step, (one for view in views for one in view[4]), on_purpose(step))
            self._see_storage(max(view[3] for view in views), step)
        self._meeting.go_on(self._job, self.group.rank, newest_stored(copies, base), anyway=named)
        _loaded.pop(self.root, None)
        seen = max((copy.incarnation.generation for copy in copies), default=0)  # more than there was to see before
        incarnation = self._meeting.incarnation
        incarnation = replace(incarnation, generation=max(incarnation.generation, 1 + seen))
        if base is not None:
            self._step = base[0]
            incarnation = replace(incarnation, parent=base[1].id, parent_step=base[0])
            self._see_to(base, copies)
        self._incarnation = incarnation

    def _see_storage(self, unseen: int, step: int) -> None:
        """Storage shows nothing of step ``unseen``, if that isn't 0, and this start goes on from ``step``."""
        if unseen and (step < unseen or self.settings.keep is None):
            raise NotFoundError(gone(self.root, unseen, step))
        if unseen and self.group.rank == 0:
            log.warning("what is saved stays in memory: %s", gone(self.root, unseen, step))

    def _see_to(self, base: Key, copies: list[Copy]) -> None:
        """Where every checkpoint is to reach storage, the one that the last start left in memory is no exception."""
        durable = max((copy.step for copy in copies if copy.place == STORAGE), default=-1)
        waits = [c for c in copies if c.key == base and c.place == MEMORY and c.persist and c.step > durable]
        if self.settings.keep is None and waits:
            self.wait_durable(waits[0].stamp, _PATIENCE)

    # -- writing ---------------------------------------------------------------------------------------------------

    def write(self, stamp: Stamp, plan: Plan, values: bytes) -> bool:
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
                    self._straight_to_storage(error)
            self._to_storage(stamp, plan, values)
            return False

    @property
    def _noted(self) -> int | None:
        """The newest step that is known to be on storage."""
        return self._job.durable() if self._job is not None else None

    def _to_memory(self, slots: Slots, stamp: Stamp, plan: Plan, values: bytes) -> None:
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

    def _to_storage(self, stamp: Stamp, plan: Plan, values: bytes) -> None:
        buffer = mmap.mmap(-1, plan.layout.file_bytes)
        _, sums = self._copier.write(plan, buffer, None, stamp.step)
        receipt = Receipt.decode(Receipt.encode(stamp, plan.static, sums, values), f"step {stamp.step}")
        refuse_elsewhere(self._store, stamp, self._noted)
        self._store.write_shard(receipt, memoryview(buffer), lambda nbytes: None)

    def finish(self, stamp: Stamp, in_memory: bool) -> None:
        """All ranks have written their parts, ``in_memory`` or some of them straight to storage. For the coordinator.

        In the second case the checkpoint is on storage when this returns; else neither store could show all of it.
        """
        self.finished = stamp
        if in_memory:
            return
        newest_on(self._store, self._noted)
        if not self._store.publish(stamp):
            self.wait_durable(stamp, _PATIENCE)  # the agent carries the parts that memory took, and publishes it
        if self._job is not None:
            with suppress(OSError):  # full memory, or none any more: the checkpoint is none the worse for it
                self._job.write_durable(stamp.step)
        with suppress(OSError):  # what is left over goes next time
            self._store.prune(*self.settings.retention)
            self._store.settle()

    # -- storage ---------------------------------------------------------------------------------------------------

    def see_finished(self) -> None:
        """Where every checkpoint is to reach storage, wait until the one before has. For the coordinator.

        The agent carries the newest one only: an older one is then safe from being passed over.
        """
        stamp, self.finished = self.finished, None
        if self.settings.keep is None and stamp is not None:
            self.wait_durable(stamp, _PATIENCE)

    def wait_durable(self, stamp: Stamp, timeout: float) -> None:
        """Return when a checkpoint is on storage. Raises NotDurableError after ``timeout`` seconds."""
        wait_durable(stamp, self._store, self._job, self._keeper, timeout)

    def _unfinished(self, stamp: Stamp) -> bool:
        """Whether a rank of this node has failed to write its part, so that nobody will carry the others'."""
        have = {s.rank for s, _ in self._job.stamps() if s.key == stamp.key} if self._job is not None else set()
        parts = (rank in have or self._store.has_shard(replace(stamp, rank=rank)) for rank in self._meeting.mates)
        return not all(parts) and not self._store.durable(stamp)

    def close(self, timeout: float) -> None:
        """Wait until what was saved last is on storage, then give the memory back. Other ranks are not waited for.

        Raises NotDurableError after ``timeout`` seconds: the agent then goes on carrying it.
        """
        if _runs.get(self.root) is self:
            del _runs[self.root]
        saved = False
        try:
            with self._lock:
                if self._newest is not None and not self._unfinished(self._newest):
                    self.wait_durable(self._newest, timeout)
                    saved = True
        finally:
            self.leave(saved)

    def leave(self, saved: bool = False) -> None:
        """Let go of everything, and of the memory too if what it holds has been ``saved``."""
        self._copier.close()
        if self._slots is not None:
            self._slots.close()
        let_go(self._job, self._keeper, self._meeting.lock, self.group.rank, self.begun, saved)
