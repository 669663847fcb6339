"""Allocates, recycles and commits one rank's slots: mapped files of the memory store that are written in place.

A slot is *free* (in ``slots/``) or *committed* (in a step's directory, with a receipt beside it). The kernel manages
the locks: a writer holds ``flock(LOCK_EX)`` on the file, a reader holds ``LOCK_SH`` (a pin), and the death of either
frees its lock. A commit is two renames: the file gets its place, then the receipt gets its name.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from pathlib import Path

from rekindle.common.failpoints import reach
from rekindle.common.os_errors import describe_error
from rekindle.errors import FormatError, MemoryStoreError, RekindleError
from rekindle.format.lineage import CheckpointKey, Incarnation, ShardId
from rekindle.format.names import receipt_name, shard_name, step_dir
from rekindle.format.receipt import read_stamp
from rekindle.memory.asking import Asking
from rekindle.memory.job_dir import JobDir
from rekindle.memory.maker import SlotMaker
from rekindle.memory.pages import AT_ONCE, PageLock, Pages
from rekindle.memory.paths import matching, remove_any
from rekindle.memory.rank_room import RankRoom
from rekindle.memory.recycling import Keeping, KeepRule, keep_own, not_durable
from rekindle.memory.slot import Slot
from rekindle.memory.snapshots import Known, keep_spare, write_receipt
from rekindle.memory.thirds import Thirds

__all__ = ["NotReadyError", "Slots"]

_IDLE = 16
"""Saves without a drain in their way after which a third slot is dropped, and without a try to make one after there was
no room for it."""
_MOST_DOUBLED = 6
"""Third slots that double the number of saves until the next one is dropped: to make one anew leaves out saves."""
_OUTRUN = 2
"""Multiple of a state's growth, while memory was made for it, that is made beyond its size the next time. Each making
has more room than the one before: growth is outrun unless it is more than half as fast as memory is made."""
_STARVES = 60.0
"""Seconds after which a save takes what other nodes count on: a drain that hangs may read all else."""
_LET_GO = 10.0
"""Seconds that the thread which makes memory gets to let go of a slot: a page lock of 1 GiB takes it one at most."""
_LET_GO_IN_A_GASP = 2.0
"""The same in a dying gasp, where a page lock may hang because a device does."""


class NotReadyError(RekindleError):
    """Memory for a snapshot is being made in the background: there will be a slot soon."""


@dataclass
class Slots:
    """Allocates and recycles the slots of one rank. For one thread at a time."""

    job: JobDir
    rank: int
    world: int
    local_ranks: Collection[int]
    """Ranks of this node, this one included."""
    limit: int | None = None
    """Most bytes that this rank may hold; None for no limit."""
    page_lock: PageLock | None = None
    """Called once for each part of a new mapping, before it is written to."""
    numa_node: int | None = None
    """Node that memory made in the background is best taken from; None for any."""
    headroom: int = 0
    """Bytes of the file system that stay free for other programs, except in a dying gasp."""
    rule: KeepRule | None = None
    """Decides which snapshots stay; None for those of this node's own ranks."""
    slots: list[Slot] = field(default_factory=list)
    _usual: int = 2
    """Number of slots of which none is dropped."""
    _reserved: int = 2
    """Number of slots that were asked for ahead."""
    _held_back: float = 0.0
    """Time from which on saves had no slot but those that other nodes count on; 0 while they have."""
    _idle_saves: int = 0
    _made_thirds: int = 0
    """Number of third slots that were made."""
    _no_third: int = 0
    """Saves until a third slot is tried again, after there was no room for one."""
    _out_of_use: list[Pages] = field(default_factory=list)
    """Mappings that a dying gasp had no use for. To unlock their pages may take a device that hangs."""
    _known: dict[str, Known] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._maker = SlotMaker(self.page_lock, self.numa_node)
        self._thirds, self._asking = Thirds(self.job.paths), Asking(self.job.paths)
        self._rule = self.rule or partial(keep_own, self.job.notes)
        self._spare = self.job.path / f"rank-{self.rank:05d}.spare"

    def adopt(self) -> None:
        """Takes over the files of an earlier process of this rank: its snapshots, and free files. Raises OSError."""
        for path in self.job.snapshots.rank_files(self.rank):
            if path.is_dir():
                for place in (path.with_suffix(".json"), path):
                    remove_any(place)
                continue
            slot = Slot(path, os.open(path, os.O_RDWR | os.O_CLOEXEC))
            self.slots.append(slot)
            if path.parent != self.job.paths.slots:
                try:
                    slot.stamp = read_stamp(path.with_suffix(".json"))
                except (FileNotFoundError, FormatError):
                    self._uncommit(slot)
        for directory in self.job.snapshots.step_dirs():
            for path in matching(directory, f".shard-{self.rank:05d}-*"):
                remove_any(path)  # a receipt whose writer died before it was complete
            _remove_empty(directory)

    def reserve(self, nbytes: int, count: int = 2, *, ahead: bool = False) -> None:
        """Has memory made for ``count`` slots of ``nbytes``: in the background, if it is more than ``AT_ONCE``.

        Those beyond the second leave room for as many copies of another node's. ``ahead``: a third one, which goes when
        it isn't needed, is there before a drain needs it. A failure is reported by the save that wants the slot.
        """
        self._reserved = count
        with suppress(OSError):
            while len(self.slots) < count and (len(self.slots) < 2 or self._room.has_one_more(self.slots, nbytes)):
                self.slots.append(self._new())
            if ahead and nbytes > AT_ONCE and len(self.slots) == 2 and self._room.has_third(self.slots, nbytes):
                self.slots.append(self._new())
                self._made_thirds += 1
            for slot in sorted(self.slots, key=attrgetter("step")):
                size = slot.size if slot.stamp else nbytes
                if slot.ready(size) or self._maker.busy_with(slot) or not (slot.stamp or slot.lock()):
                    continue
                if size > AT_ONCE:
                    self._maker.make(slot, size)
                else:
                    slot.make(size, self.page_lock)
                    slot.unlock()

    @property
    def _room(self) -> RankRoom:
        return RankRoom(self.job, len(self.local_ranks), self.limit, self.headroom)

    def make_third(self, start: str) -> None:
        """Has a third slot made if a drain asks for one, or needs it soon.

        It reads the older one of two, and the newest stays. ``start`` is the id of the incarnation.
        """
        if len(self.slots) != 2 or any(self._maker.makes(slot) for slot in self.slots):
            return
        with suppress(OSError):
            nbytes = max(slot.size for slot in self.slots)
            if nbytes <= AT_ONCE:
                return
            asked = self._thirds.are_asked()
            stamps = [slot.stamp for slot in self.slots if slot.stamp is not None]
            if not asked and not not_durable(stamps, self.job.notes.durable()):
                return
            if not self._no_third and self._room.has_third(self.slots, nbytes):
                slot = self._new()
                slot.lock()
                self.slots.append(slot)
                self._made_thirds += 1
                self._maker.make(slot, nbytes)
            elif asked and self._thirds.are_made(start):
                self._thirds.write_made(start, refused=True)

    def wait_made(self, timeout: float) -> bool:
        """Waits until no memory is being made, cut or dropped. Returns False after ``timeout`` seconds."""
        return self._maker.wait(timeout)

    def _new(self) -> Slot:
        path = self.job.paths.slots / f"rank-{self.rank:05d}-new.slot"
        try:
            slot = Slot(path, os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
            self._make_free(slot)
        except OSError as error:
            raise MemoryStoreError(f"memory store {path}: {describe_error(error)}") from error
        return slot

    # -- writing ------------------------------------------------------------------------------------------------

    def acquire(
        self,
        step: int,
        incarnation: Incarnation,
        nbytes: int,
        *,
        wait: bool = True,
        gasp: bool = False,
        busy: Slot | None = None,
    ) -> Slot:
        """Returns a locked, mapped slot of ``nbytes`` to write the snapshot of ``step`` into.

        A file that is being read is never touched. At least one step that every rank of this node has committed stays:
        the newest, unless that leaves no room. ``rule`` says what else stays. Raises MemoryStoreError when no slot can
        be had, or when one more would leave less than the headroom free, which only a dying ``gasp`` may use; with
        ``wait=False`` NotReadyError while other nodes count on what it would take. ``busy`` is a slot that is being
        written to.

        Memory that is not ready is made now, or with ``wait=False`` in the background, if it is more than ``AT_ONCE``:
        NotReadyError is raised until it is there. So is a surplus given back. A gasp waits, page-locks nothing, and
        gives nothing back.
        """
        if not self.job.paths.slots.is_dir():
            raise MemoryStoreError(f"memory store {self.job.path}: was removed: saves fail until it is back")
        try:
            if any(slot.fd < 0 for slot in self.slots):  # Ctrl-C interrupted a recovery
                self.recover()
            self.job.write_job_again()  # before the snapshot: no agent drains one of an unknown job
        except OSError as error:
            raise MemoryStoreError(f"memory store {self.job.path}: {describe_error(error)}") from error
        for slot in self.slots:
            if slot.stamp and self._superseded(slot.stamp, step, incarnation):
                self._uncommit(slot)
        now = wait or gasp or nbytes <= AT_ONCE
        self._drop_unmade()
        slot = self._take(nbytes, incarnation.id, busy, now=now, wait=wait, gasp=gasp)
        self._held_back = 0.0
        try:
            self._check_headroom(nbytes - slot.held, nbytes, gasp=gasp)
            self._end_work(slot, now=now, gasp=gasp)
            if slot.stamp is not None:
                self._uncommit(slot)
            reach("save.recycled", step)
            if not slot.ready(nbytes):
                self._make(slot, nbytes, now=now or slot.lacks(nbytes) <= AT_ONCE, gasp=gasp)
            if (wait and not gasp) or slot.size - nbytes <= AT_ONCE:  # 1 GiB takes 0.2 s
                slot.trim(nbytes)
            elif not gasp:
                self._maker.trim(slot, nbytes)
            slot.asked = 0
        except OSError as error:
            slot.unlock()
            if isinstance(error, MemoryStoreError):
                raise
            raise MemoryStoreError(f"memory store {slot.path}: {describe_error(error)}") from error
        return slot

    @staticmethod
    def _superseded(stamp: ShardId, step: int, incarnation: Incarnation) -> bool:
        if stamp.incarnation == incarnation:
            return stamp.step == step
        return stamp.step > incarnation.parent_step

    def _check_headroom(self, more: int, nbytes: int, *, gasp: bool) -> None:
        if not (gasp or self._room.leaves_headroom(more)):
            raise MemoryStoreError(
                f"memory store {self.job.path}: a snapshot of {nbytes:,} bytes would leave less than "
                f"{self.headroom:,} bytes to others: make the file system larger, or lower memory_headroom"
            )

    def _end_work(self, slot: Slot, *, now: bool, gasp: bool) -> None:
        """Raises the error of the making of a slot's memory, unless it is to be made ``now``. Stops a cut."""
        unmade = self._maker.error_of(slot)
        if unmade is not None and not now:
            raise unmade
        if not self._maker.recall(slot, _LET_GO_IN_A_GASP if gasp else _LET_GO):
            raise MemoryStoreError(f"memory store {slot.path}: a thread that cuts the file does not end")

    def _make(self, slot: Slot, nbytes: int, *, now: bool, gasp: bool) -> None:
        """Makes the memory of a locked slot. Raises NotReadyError unless it is to be done ``now``."""
        if not now:
            self._maker.make(slot, nbytes, self._extra(slot, nbytes))
            raise NotReadyError(f"memory for a snapshot of {nbytes:,} bytes is being made")
        if gasp and slot.map is not None and slot.map.page_locked:
            self._out_of_use.append(slot.map)
        slot.make(nbytes, None if gasp else self.page_lock)

    def _extra(self, slot: Slot, nbytes: int) -> int:
        """Returns the bytes to be made beyond ``nbytes``: some if the state has outgrown what was made for it last.

        Else a state that grows at each step might never fit. What isn't used is given back.
        """
        grown, slot.asked = nbytes - slot.asked if slot.asked else 0, nbytes
        whole = nbytes + max(0, _OUTRUN * grown)
        return whole - nbytes if self._room.has_larger(self.slots, whole) else 0

    def _take(self, nbytes: int, start: str, busy: Slot | None, *, now: bool, wait: bool, gasp: bool) -> Slot:
        """Returns a locked slot: one that is ready, else the oldest expendable one, else a new one.

        Without room for a new one it takes any whose loss leaves another complete step. Raises NotReadyError where one
        is being made and it isn't needed ``now``, or all are needed elsewhere and the save can't ``wait``.
        """
        committed = sorted((s for s in self.slots if s.stamp), key=attrgetter("step"))
        complete = self.complete_checkpoints()
        keeping = self._rule([s.stamp for s in committed if s.stamp], complete, start)
        self._usual = max(keeping.usual, self._reserved)
        usable = [s for s in self.slots if s is not busy and not s.lost]
        spare = [s for s in usable if s.stamp is None or s.stamp.checkpoint not in keeping.kept]
        spare.sort(key=lambda s: (not s.ready(nbytes), s.step))
        making = [s for s in spare if self._maker.makes(s)]
        locked = [s for s in spare if s not in making and s.lock()]
        if locked:
            self._release_surplus(locked[1:], nbytes, gasp=gasp)
            return locked[0]
        for slot in making:
            if not now:
                raise NotReadyError(f"memory for a snapshot of {nbytes:,} bytes is being made")
            if self._maker.recall(slot, _LET_GO_IN_A_GASP if gasp else _LET_GO) and slot.lock():
                return slot
        found = self._take_new(nbytes, keeping.most, now=now, gasp=gasp)
        if found is None:
            promised = self._note_promises(usable, keeping, start)
            starves = self.rule is None and 0.0 < self._held_back < time.monotonic() - _STARVES
            found = self._take_kept(committed, complete, keeping, all_of_it=gasp or starves)
            if found is None and promised:
                self._held_back = self._held_back or time.monotonic()
                if not wait:
                    raise NotReadyError("all nodes keep a step together, and memory has no room for one more beside it")
        if found is None:
            raise MemoryStoreError(
                f"memory store {self.job.path}: every snapshot is being read, and there is no room for one more of "
                f"{nbytes:,} bytes: make the file system larger, raise memory_limit, or lower memory_headroom"
            )
        return found

    def _note_promises(self, usable: Sequence[Slot], keeping: Keeping, start: str) -> bool:
        """Returns True if other nodes count on one of the snapshots in ``usable``, so that a slot comes free soon.

        A node without room for a third slot can't keep such promises for long, and notes that.
        """
        promised = any(slot.stamp and slot.stamp.checkpoint in keeping.promised for slot in usable)
        if promised and self.rule is None and len(usable) <= 2:
            with suppress(OSError):
                self.job.notes.write_cramped(start)
        return promised

    def _take_kept(
        self, committed: Sequence[Slot], complete: Sequence[CheckpointKey], keeping: Keeping, *, all_of_it: bool
    ) -> Slot | None:
        """Returns a locked slot of those that should stay: the newest, but those that are dearest come last."""
        held = [(slot, slot.stamp.checkpoint) for slot in reversed(committed) if slot.stamp]
        held.sort(key=lambda one: keeping.order(one[1]))
        for slot, key in held:
            others = any(other in complete for one, other in held if one is not slot)
            if not others or self._maker.makes(slot) or (key in keeping.promised and not all_of_it):
                continue
            if slot.lock():
                return slot
        return None

    def _take_new(self, nbytes: int, most: int, *, now: bool, gasp: bool) -> Slot | None:
        """Returns a new slot, locked; None if there are to be no more than there are, or there is no room.

        Its memory is there already if it is needed ``now``. A fourth one leaves room for a second copy of what this
        node keeps for another one.
        """
        self._no_third = max(0, self._no_third - 1)
        if len(self.slots) >= most or not self._room.within_limit(len(self.slots) + 1, nbytes):
            return None
        beside = self.job.copies.held_bytes() if len(self.slots) > 2 else 0
        if not (gasp or self._room.leaves_headroom(nbytes, beside)):
            return None
        if self._no_third and not now:
            return None
        slot = self._new()
        slot.lock()
        try:
            if now:
                self._make(slot, nbytes, now=now, gasp=gasp)
        except MemoryStoreError:
            slot.path.unlink()
            slot.close()
            return None
        self.slots.append(slot)
        self._made_thirds += len(self.slots) > 2
        return slot

    def _drop_unmade(self) -> None:
        """Drops a third slot for which there was no room: saves do without one for a while."""
        for slot in self.slots[2:]:
            if slot.stamp is None and not self._maker.busy_with(slot) and self._maker.error_of(slot) is not None:
                self._drop(slot, self._maker.drop)
                self._no_third = _IDLE

    def _release_surplus(self, surplus: list[Slot], nbytes: int, *, gasp: bool) -> None:
        """Unlocks slots that were not needed; drops one that isn't usual, and that no drain has needed for a while.

        It goes at once where all can't be of ``nbytes``: the state has grown. A gasp drops none: page locks can't be
        given up beside a device that is stuck.
        """
        self._idle_saves = self._idle_saves + 1 if surplus else 0
        enough = _IDLE << min(max(self._made_thirds - 1, 0), _MOST_DOUBLED)
        for slot in surplus:
            slot.unlock()
            if gasp or len(self.slots) <= self._usual:
                continue
            if not self._room.has_larger(self.slots, nbytes) and self._maker.recall(slot, _LET_GO):
                self._drop(slot, Slot.close)
            elif self._idle_saves >= enough and not self._thirds.are_asked():
                self._drop(slot, self._maker.drop)

    def _drop(self, slot: Slot, close: Callable[[Slot], object]) -> None:
        if slot.stamp is not None:
            self._uncommit(slot)
        slot.path.unlink()
        self.slots.remove(slot)
        close(slot)

    def complete_checkpoints(self) -> list[CheckpointKey]:
        """Returns the checkpoints of which every rank of this node has a snapshot, oldest first."""
        if set(self.local_ranks) == {self.rank}:  # it knows its own receipts, and only has to see that they are there
            own = ((slot.stamp, slot.path.with_suffix(".json")) for slot in self.slots if slot.stamp is not None)
            return sorted(stamp.checkpoint for stamp, receipt in own if receipt.exists())
        ranks: dict[CheckpointKey, set[int]] = {}
        there = set()
        for stamp, path in self.job.snapshots.shard_ids(self._known):
            there.add(str(path))
            ranks.setdefault(stamp.checkpoint, set()).add(stamp.rank)
        self._known = {path: seen for path, seen in self._known.items() if path in there}
        return sorted(key for key, have in ranks.items() if have.issuperset(self.local_ranks))

    def pins_due(self, newest: ShardId) -> list[ShardId]:
        """Returns the snapshots older than ``newest`` that storage still has to get and pin, oldest first."""
        at, start = newest.step, newest.incarnation
        older = sorted((s.stamp for s in self.slots if s.stamp and s.stamp.step < at), key=attrgetter("step"))
        pins = [stamp for stamp in not_durable(older, self.job.notes.durable()) if stamp.pinned]
        return [stamp for stamp in pins if not self._superseded(stamp, at, start)]

    def _uncommit(self, slot: Slot) -> None:
        """Makes a snapshot's file a free one. A reader that has it open can read on; no other process finds it."""
        directory = slot.path.parent
        if directory == self.job.paths.slots:
            return
        remove_any(slot.path.with_suffix(".json"))
        self._make_free(slot)
        _remove_empty(directory)

    def _make_free(self, slot: Slot) -> None:
        """Moves a file to the free ones, under a name that no other file can have."""
        free = self.job.paths.slots / f"rank-{self.rank:05d}-{os.fstat(slot.fd).st_ino}.slot"
        slot.stamp = None
        try:
            os.rename(slot.path, free)
        except OSError as error:
            raise MemoryStoreError(f"memory store {slot.path}: {describe_error(error)}") from error
        slot.path = free

    def commit(self, slot: Slot, stamp: ShardId, receipt: bytes) -> None:
        """Makes the written slot the snapshot of ``stamp``, visible from the moment its receipt has its name.

        Raises MemoryStoreError when that fails; the slot is then free again.
        """
        try:
            self._commit(slot, stamp, receipt)
        except OSError as error:
            self._uncommit(slot)
            slot.unlock()
            raise MemoryStoreError(f"memory store {slot.path}: {describe_error(error)}") from error

    def _commit(self, slot: Slot, stamp: ShardId, receipt: bytes) -> None:
        reach("save.copied", stamp.step)
        path = self.job.path / step_dir(stamp.step) / shard_name(stamp.rank, stamp.world)
        for older in [other for other in self.slots if other is not slot and other.path == path]:
            self._uncommit(older)  # of an earlier start, which saved this step too
        while True:
            try:
                path.parent.mkdir(mode=0o700, exist_ok=True)
                os.rename(slot.path, path)
                break
            except (FileNotFoundError, FileExistsError):  # another rank has just removed the empty directory
                if not slot.path.exists() or path.parent.is_file():
                    raise
        slot.path, slot.stamp = path, stamp
        reach("save.renamed", stamp.step)
        slot.unlock()  # before its receipt: a reader that finds it must be able to pin it
        self.write_receipt(stamp, receipt)

    def write_receipt(self, stamp: ShardId, receipt: bytes) -> None:
        """Writes or replaces the receipt of a committed snapshot. Raises MemoryStoreError."""
        path = self.job.path / step_dir(stamp.step) / receipt_name(stamp.rank, stamp.world)
        try:
            write_receipt(path, receipt, stamp.step, self._spare)
        except OSError as error:
            raise MemoryStoreError(f"memory store {path}: {describe_error(error)}") from error
        if self.rule is None:  # nobody replaces the receipt of a copy
            keep_spare(self._spare, receipt)
        if stamp.persist or stamp.pinned:
            with suppress(OSError):  # memory is full: the agent sees it all the same, some tenths of a second later
                self._asking.ask()
        reach("save.committed", stamp.step)

    def recover(self) -> None:
        """Starts again from the files, after a save was interrupted at an unknown point. Raises OSError.

        Free files are removed, not used again: threads of the interrupted save may still write into one.
        """
        self.close()
        for path in matching(self.job.paths.slots, f"rank-{self.rank:05d}-*.slot"):
            remove_any(path)
        self.adopt()

    def free_all(self) -> None:
        """Makes all snapshots free files. Raises MemoryStoreError."""
        for slot in self.slots:
            if slot.stamp is not None:
                self._uncommit(slot)

    def close(self) -> None:
        """Closes all slots. Their files stay. May be called again, also after a signal handler interrupted it.

        A mapping that somebody writes into goes when they have ended, and so do its page locks.
        """
        for slot in self.slots:
            if self._maker.recall(slot, _LET_GO):  # else it stays open: the thread may still use the descriptor
                slot.close()
        self.slots.clear()


def _remove_empty(directory: Path) -> None:
    with suppress(OSError):  # other ranks have snapshots in it
        directory.rmdir()
