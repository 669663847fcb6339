"""Allocates, recycles and commits one rank's slots: mapped files of the memory store that are written in place.

A slot is *free* (in ``slots/``) or *committed* (in a step's directory, with a receipt beside it). The kernel manages
the locks: a writer holds ``flock(LOCK_EX)`` on the file, a reader holds ``LOCK_SH`` (a pin), and the death of either
frees its lock. A commit is two renames: the file gets its place, then the receipt gets its name.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import sys
import threading
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from rekindle.common.failpoints import reach
from rekindle.common.os_errors import describe_error
from rekindle.errors import FormatError, MemoryStoreError
from rekindle.format.lineage import CheckpointKey, Incarnation, ShardId
from rekindle.format.names import receipt_name, shard_name, step_dir
from rekindle.format.receipt import read_stamp
from rekindle.memory.job_dir import JobDir
from rekindle.memory.paths import matching
from rekindle.memory.snapshots import Known

__all__ = ["Slot", "Slots"]

_MADV_POPULATE_WRITE = 23  # Linux 5.14
_POPULATE_BYTES = 64 << 20
"""Bytes populated by one call, which no signal interrupts."""
_IDLE = 16
"""Saves without a drain in their way after which a third slot is given up."""
_libc = ctypes.CDLL(None, use_errno=True) if sys.platform.startswith("linux") else None


@dataclass(eq=False)
class Slot:
    """Holds one file and its mapping. For one thread at a time."""

    path: Path
    fd: int
    """-1 once it is closed."""
    stamp: ShardId | None = None
    """Snapshot that the slot holds; None while it is free."""
    map: mmap.mmap | None = None
    cache: object = None
    """Views into ``map`` that the writer keeps. Dropped with it."""
    prepared: object = None
    """Result of ``Slots.prepare`` for ``map``. Dropped with it."""

    @property
    def size(self) -> int:
        """Size of the file in bytes."""
        return os.fstat(self.fd).st_size

    def lock(self) -> bool:
        """Locks the file for writing. False while a reader has it pinned. Raises MemoryStoreError."""
        try:
            fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            return False
        except OSError as error:
            raise MemoryStoreError(f"memory store {self.path}: {describe_error(error)}") from error

    def unlock(self) -> None:
        """Unlocks the file, so that it can be drained or used for the next save. Does nothing for a closed one."""
        with suppress(OSError, ValueError):
            fcntl.flock(self.fd, fcntl.LOCK_UN)

    def resize(self, nbytes: int) -> None:
        """Gives the file exactly ``nbytes`` of memory, and maps at least these. Raises MemoryStoreError.

        A store into a hole of a full tmpfs kills the process with SIGBUS; posix_fallocate fails with ENOSPC instead.
        """
        size = self.size
        if self.map is not None and len(self.map) >= nbytes and size >= nbytes:
            if (
                size > nbytes
            ):  # the rest of the mapping is not touched, and a new mapping would cost its page faults again
                os.ftruncate(self.fd, nbytes)
            return
        self._unmap()
        try:
            os.ftruncate(self.fd, nbytes)
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(self.fd, 0, nbytes)
        except OSError as error:
            os.ftruncate(self.fd, 0)
            why = f"no room left for a snapshot of {nbytes:,} bytes: free some of it, or make the file system larger"
            if error.errno != errno.ENOSPC:
                why = describe_error(error)
            raise MemoryStoreError(f"memory store {self.path.parent}: {why}") from error
        self.map = mmap.mmap(self.fd, nbytes)

    def populate(self) -> None:
        """Maps every page now, so that the first save is as fast as later ones. Releases the interpreter lock."""
        if self.map is None or _libc is None:
            return
        anchor = ctypes.c_char.from_buffer(self.map)
        start, end = ctypes.addressof(anchor), len(self.map)
        for at in range(0, end, _POPULATE_BYTES):
            if _libc.madvise(
                ctypes.c_void_p(start + at), ctypes.c_size_t(min(_POPULATE_BYTES, end - at)), _MADV_POPULATE_WRITE
            ):
                return  # an older kernel: the first save takes the page faults itself

    def _unmap(self) -> None:
        self.cache = self.prepared = None  # both before the mapping that they refer to
        self.map = None

    def close(self) -> None:
        """Closes the file. A second call does nothing: the descriptor's number may be that of another file by then."""
        self._unmap()
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)


def _step(slot: Slot) -> int:
    return slot.stamp.step if slot.stamp else -1


@dataclass
class Slots:
    """Allocates and recycles the slots of one rank. For one thread at a time, the one of ``reserve`` included."""

    job: JobDir
    rank: int
    world: int
    local_ranks: Collection[int]
    """Ranks of this node, this one included."""
    limit: int | None = None
    """Most bytes that this rank may hold; None for no limit."""
    prepare: Callable[[mmap.mmap], object] | None = None
    """Called once with each new mapping before it is written to, to page-lock it."""
    headroom: int = 0
    """Bytes of the file system that stay free for other programs, except in a dying gasp."""
    slots: list[Slot] = field(default_factory=list)
    _reserving: threading.Thread | None = None
    _idle_saves: int = 0
    _known: dict[str, Known] = field(default_factory=dict)

    def adopt(self) -> None:
        """Takes over the files of an earlier process of this rank: its snapshots, and free files. Raises OSError."""
        for path in self.job.snapshots.rank_files(self.rank):
            slot = Slot(path, os.open(path, os.O_RDWR | os.O_CLOEXEC))
            self.slots.append(slot)
            if path.parent != self.job.paths.slots:
                try:
                    slot.stamp = read_stamp(path.with_suffix(".json"))
                except (FileNotFoundError, FormatError):
                    self._uncommit(slot)
        for directory in self.job.snapshots.step_dirs():
            for path in matching(directory, f".shard-{self.rank:05d}-*"):
                path.unlink(missing_ok=True)  # a receipt whose writer died before it was complete
            _remove_empty(directory)

    def reserve(self, nbytes: int, count: int = 2) -> None:
        """Allocates and populates ``count`` slots of ``nbytes`` in the background. Existing snapshots are not touched.

        A failure is not reported here: the first save fails for the same reason, and reports it.
        """

        def work() -> None:
            try:
                while len(self.slots) < count:
                    self.slots.append(self._new())
                for slot in self.slots:
                    if slot.stamp is None and slot.lock():
                        slot.resize(nbytes)
                        slot.unlock()
                    elif slot.stamp is not None and slot.size:
                        slot.map = mmap.mmap(slot.fd, slot.size)
                    slot.populate()
                    self._prepare(slot)
            except (OSError, ValueError):
                return

        self._reserving = threading.Thread(target=work, name="rekindle-reserve", daemon=True)
        self._reserving.start()

    def wait_reserved(self) -> None:
        """Waits until ``reserve`` has ended."""
        if self._reserving is not None:
            self._reserving.join()
            self._reserving = None

    def _prepare(self, slot: Slot) -> None:
        if self.prepare is not None and slot.prepared is None and slot.map is not None:
            slot.prepared = self.prepare(slot.map)

    def _new(self) -> Slot:
        path = self.job.paths.slots / f"rank-{self.rank:05d}-new.slot"
        try:
            slot = Slot(path, os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
            self._make_free(slot)
        except OSError as error:
            raise MemoryStoreError(f"memory store {path}: {describe_error(error)}") from error
        return slot

    # -- writing ------------------------------------------------------------------------------------------------

    def acquire(self, step: int, incarnation: Incarnation, nbytes: int, *, gasp: bool = False) -> Slot:
        """Returns a locked, mapped slot of ``nbytes`` to write the snapshot of ``step`` into.

        A file that is being read is never touched. At least one step that every rank of this node has committed stays:
        the newest, unless that leaves no room. Raises MemoryStoreError when no slot can be had, or when one more would
        leave less than the headroom free, which only a dying ``gasp`` may use.
        """
        self.wait_reserved()
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
        slot = self._take(nbytes, gasp)
        if slot.stamp is not None:
            self._uncommit(slot)
        reach("save.recycled", step)
        try:
            if not (gasp or self._leaves_headroom(nbytes - slot.size)):
                raise MemoryStoreError(
                    f"memory store {self.job.path}: a snapshot of {nbytes:,} bytes would leave less than "
                    f"{self.headroom:,} bytes to others: make the file system larger, or lower memory_headroom"
                )
            slot.resize(nbytes)
        except MemoryStoreError:
            slot.unlock()
            raise
        self._prepare(slot)
        return slot

    @staticmethod
    def _superseded(stamp: ShardId, step: int, incarnation: Incarnation) -> bool:
        if stamp.incarnation == incarnation:
            return stamp.step == step
        return stamp.step > incarnation.parent_step

    def _leaves_headroom(self, more: int) -> bool:
        """True if each rank of this node can take ``more`` bytes and the headroom stays: all of them do at once."""
        return more <= 0 or not self.headroom or self.job.free_bytes() - more * len(self.local_ranks) >= self.headroom

    def _take(self, nbytes: int, gasp: bool) -> Slot:
        """Returns a locked slot: a free one, else the oldest expendable one, else a new one.

        Without room for a new one it takes any whose loss leaves another complete step.
        """
        committed = sorted((s for s in self.slots if s.stamp), key=_step)
        complete = self.complete_checkpoints()
        keep = {complete[-1]} if complete else set()
        pending = self._pending(committed)
        most = 3 + any(
            s.stamp.pinned for s in pending if s.stamp
        )  # a snapshot to be pinned may wait for a drain to end, while saves go on
        keep |= {s.stamp.checkpoint for s in committed[-1:] + pending if s.stamp}
        spare = [s for s in self.slots if s.stamp is None or s.stamp.checkpoint not in keep]
        spare.sort(key=_step)
        locked = [s for s in spare if s.lock()]
        if locked:
            self._release_surplus(locked[1:])
            return locked[0]
        within = self.limit is None or (len(self.slots) + 1) * nbytes <= self.limit
        if len(self.slots) < most and within and (gasp or self._leaves_headroom(nbytes)):
            slot = self._new()
            slot.lock()
            try:
                slot.resize(nbytes)
            except MemoryStoreError:
                slot.path.unlink()
                slot.close()
            else:
                self.slots.append(slot)
                return slot
        for slot in sorted(committed, key=lambda s: s in pending):  # those that storage still needs come last
            others = [s for s in committed if s is not slot and s.stamp and s.stamp.checkpoint in complete]
            if others and slot.lock():
                return slot
        raise MemoryStoreError(
            f"memory store {self.job.path}: every snapshot is being read, and there is no room for one more of "
            f"{nbytes:,} bytes: make the file system larger, raise memory_limit, or lower memory_headroom"
        )

    def _release_surplus(self, surplus: list[Slot]) -> None:
        """Unlocks slots that were not needed; removes a third slot that no drain has needed for a while."""
        self._idle_saves = self._idle_saves + 1 if surplus else 0
        for slot in surplus:
            slot.unlock()
            if len(self.slots) > 2 and self._idle_saves >= _IDLE:
                if slot.stamp is not None:
                    self._uncommit(slot)
                slot.path.unlink()
                slot.close()
                self.slots.remove(slot)

    def complete_checkpoints(self) -> list[CheckpointKey]:
        """Returns the checkpoints of which every rank of this node has a snapshot, oldest first."""
        ranks: dict[CheckpointKey, set[int]] = {}
        there = set()
        for stamp, path in self.job.snapshots.shard_ids(self._known):
            there.add(str(path))
            ranks.setdefault(stamp.checkpoint, set()).add(stamp.rank)
        self._known = {path: seen for path, seen in self._known.items() if path in there}
        return sorted(key for key, have in ranks.items() if have.issuperset(self.local_ranks))

    def _pending(self, committed: list[Slot]) -> list[Slot]:
        """Returns the newest snapshot that storage still needs, and the oldest that is to be pinned there.

        One to be pinned at a time is enough: a save that pins waits for the one before.
        """
        lacking = self._not_durable(committed)
        return lacking[-1:] + [s for s in lacking if s.stamp and s.stamp.pinned][:1]

    def pins_due(self, newest: ShardId) -> list[ShardId]:
        """Returns the snapshots older than ``newest`` that storage still has to get and pin, oldest first."""
        at, start = newest.step, newest.incarnation
        committed = sorted((s for s in self.slots if s.stamp and s.stamp.step < at), key=_step)
        pins = [s.stamp for s in self._not_durable(committed) if s.stamp and s.stamp.pinned]
        return [stamp for stamp in pins if not self._superseded(stamp, at, start)]

    def _not_durable(self, committed: list[Slot]) -> list[Slot]:
        """Returns the snapshots that are to go to storage and aren't there yet."""
        durable = self.job.notes.durable()
        return [s for s in committed if s.stamp and s.stamp.persist and (durable is None or s.stamp.step > durable)]

    def _uncommit(self, slot: Slot) -> None:
        """Makes a snapshot's file a free one. A reader that has it open can read on; no other process finds it."""
        directory = slot.path.parent
        if directory == self.job.paths.slots:
            return
        slot.path.with_suffix(".json").unlink(missing_ok=True)
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
        temporary = path.with_name(f".{path.name}.tmp")
        try:
            with open(temporary, "wb", buffering=0) as file:
                half = len(receipt) // 2  # for the failpoint, at which a test ends the process
                _write(file.fileno(), receipt[:half])
                reach("save.receipt", stamp.step)
                _write(file.fileno(), receipt[half:])
        except OSError as error:
            temporary.unlink(missing_ok=True)
            raise MemoryStoreError(f"memory store {path}: {describe_error(error)}") from error
        os.replace(temporary, path)
        reach("save.committed", stamp.step)

    def recover(self) -> None:
        """Starts again from the files, after a save was interrupted at an unknown point. Raises OSError.

        Free files are removed, not used again: threads of the interrupted save may still write into one.
        """
        self.close()
        for path in matching(self.job.paths.slots, f"rank-{self.rank:05d}-*.slot"):
            path.unlink(missing_ok=True)
        self.adopt()

    def free_all(self) -> None:
        """Makes all snapshots free files. Raises MemoryStoreError."""
        self.wait_reserved()
        for slot in self.slots:
            if slot.stamp is not None:
                self._uncommit(slot)

    def close(self) -> None:
        """Closes all slots. Their files stay. May be called again, also after a signal handler interrupted it."""
        self.wait_reserved()
        for slot in self.slots:
            slot.close()
        self.slots.clear()


def _remove_empty(directory: Path) -> None:
    try:
        directory.rmdir()
    except OSError:
        pass  # other ranks have snapshots in it


def _write(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
