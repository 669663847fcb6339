"""One rank's files in the memory store: pre-allocated, mapped, written in place, committed by rename, recycled.

A file is *free* (in ``slots/``) or *committed* (in a step's directory, with a receipt beside it). The kernel is the
lock manager: whoever writes a file holds ``flock(LOCK_EX)`` on it, whoever reads one holds ``LOCK_SH`` (a pin), and
the death of either frees what it held.
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
_FAULT_STEP = 64 << 20
_libc = ctypes.CDLL(None, use_errno=True) if sys.platform.startswith("linux") else None


@dataclass(eq=False)
class Slot:
    """One file and its mapping. ``stamp`` is None while it is free."""

    path: Path
    fd: int
    """-1 once it is closed."""
    stamp: ShardId | None = None
    map: mmap.mmap | None = None
    cache: object = None
    """The writer's own: views into ``map``. Dropped with it."""
    prepared: object = None
    """What ``Slots.prepare`` made of ``map``. Dropped with it."""

    @property
    def size(self) -> int:
        return os.fstat(self.fd).st_size

    def lock(self) -> bool:
        """Take the file for writing. False while somebody reads it."""
        try:
            fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            return False
        except OSError as error:
            raise MemoryStoreError(f"memory store {self.path}: {describe_error(error)}") from error

    def unlock(self) -> None:
        # Locked files are not drained, and used for the next save. A closed one is locked no more.
        with suppress(OSError, ValueError):
            fcntl.flock(self.fd, fcntl.LOCK_UN)

    def resize(self, nbytes: int) -> None:
        """Give the file exactly ``nbytes`` of memory, and map at least these.

        A store into a hole of a full tmpfs kills the process with SIGBUS; posix_fallocate fails with ENOSPC instead.
        """
        size = self.size
        if self.map is not None and len(self.map) >= nbytes and size >= nbytes:
            if size > nbytes:  # nobody touches the rest of the mapping, and its pages need not be faulted in again
                os.ftruncate(self.fd, nbytes)
            return
        self._unmap()
        try:
            os.ftruncate(self.fd, nbytes)
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(self.fd, 0, nbytes)
        except OSError as error:
            os.ftruncate(self.fd, 0)
            why = f"no room left for a snapshot of {nbytes:,} bytes: free some of it, or give it more"
            if error.errno != errno.ENOSPC:
                why = describe_error(error)
            raise MemoryStoreError(f"memory store {self.path.parent}: {why}") from error
        self.map = mmap.mmap(self.fd, nbytes)

    def fault_in(self) -> None:
        """Map every page now, so that the first save runs at the speed of later ones. Outside the interpreter lock."""
        if self.map is None or _libc is None:
            return
        anchor = ctypes.c_char.from_buffer(self.map)
        start, end = ctypes.addressof(anchor), len(self.map)
        for at in range(0, end, _FAULT_STEP):
            if _libc.madvise(
                ctypes.c_void_p(start + at), ctypes.c_size_t(min(_FAULT_STEP, end - at)), _MADV_POPULATE_WRITE
            ):
                return  # an older kernel: the first save faults the pages itself

    def _unmap(self) -> None:
        self.cache = self.prepared = None  # both before the mapping that they speak of
        self.map = None

    def close(self) -> None:
        """Let go of the file. Again does nothing: by then its descriptor's number may be that of another file."""
        self._unmap()
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)


def _step_of(slot: Slot) -> int:
    return slot.stamp.step if slot.stamp else -1


@dataclass
class Slots:
    """The slots of one rank. Used by one thread at a time, ``reserve``'s included."""

    job: JobDir
    rank: int
    world: int
    local_ranks: Collection[int]
    """Ranks on this node, this one included."""
    limit: int | None = None
    """Bytes that this rank may hold."""
    prepare: Callable[[mmap.mmap], object] | None = None
    """Called once with each new mapping that is to be written to."""
    headroom: int = 0
    """Bytes of the file system that are left to others. Only dying gasps may have them."""
    slots: list[Slot] = field(default_factory=list)
    _reserving: threading.Thread | None = None
    _unneeded: int = 0
    _known: dict[str, Known] = field(default_factory=dict)

    def adopt(self) -> None:
        """Take over what an earlier process of this rank left: snapshots to restore from, and free files."""
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
                path.unlink(missing_ok=True)  # a receipt that its writer did not live to finish
            _remove_empty(directory)

    def reserve(self, nbytes: int, count: int = 2) -> None:
        """Allocate and fault in ``count`` slots of ``nbytes`` in the background. Snapshots that exist stay untouched.

        Failing is no error here: the first save meets the same lack of room and reports it.
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
                    slot.fault_in()
                    self._prepare(slot)
            except (OSError, ValueError):
                return

        self._reserving = threading.Thread(target=work, name="rekindle-reserve", daemon=True)
        self._reserving.start()

    def ready(self) -> None:
        """Wait until ``reserve`` has ended."""
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
            self._park(slot)
        except OSError as error:
            raise MemoryStoreError(f"memory store {path}: {describe_error(error)}") from error
        return slot

    # -- writing ------------------------------------------------------------------------------------------------

    def acquire(self, step: int, incarnation: Incarnation, nbytes: int, *, gasp: bool = False) -> Slot:
        """A locked, mapped slot of ``nbytes`` to write the snapshot of ``step`` into.

        One step that every rank of this node has committed always stays, the newest unless that leaves no room; a file
        that somebody is reading is never touched. Raises MemoryStoreError when no slot is left, or one more would leave
        less to others than the headroom, which a ``gasp`` may use up.
        """
        self.ready()
        if not self.job.paths.slots.is_dir():
            raise MemoryStoreError(f"memory store {self.job.path}: has been removed by somebody")
        try:
            if any(slot.fd < 0 for slot in self.slots):  # Ctrl-C has broken off a recovery
                self.recover()
            self.job.write_job_again()  # before the snapshot: nobody drains one of an unknown job
        except OSError as error:
            raise MemoryStoreError(f"memory store {self.job.path}: {describe_error(error)}") from error
        for slot in self.slots:
            if slot.stamp and self._abandoned(slot.stamp, step, incarnation):
                self._uncommit(slot)
        slot = self._take(nbytes, gasp)
        if slot.stamp is not None:
            self._uncommit(slot)
        reach("save.recycled", step)
        try:
            if not (gasp or self._spares(nbytes - slot.size)):
                raise MemoryStoreError(
                    f"memory store {self.job.path}: a snapshot of {nbytes:,} bytes would leave less than "
                    f"{self.headroom:,} bytes to others: give it more, or lower memory_headroom"
                )
            slot.resize(nbytes)
        except MemoryStoreError:
            slot.unlock()
            raise
        self._prepare(slot)
        return slot

    @staticmethod
    def _abandoned(stamp: ShardId, step: int, incarnation: Incarnation) -> bool:
        if stamp.incarnation == incarnation:
            return stamp.step == step
        return stamp.step > incarnation.parent_step

    def _spares(self, more: int) -> bool:
        """Whether all ranks of this node may take so many bytes more and leave the headroom: they do it all at once."""
        return more <= 0 or not self.headroom or self.job.free_bytes() - more * len(self.local_ranks) >= self.headroom

    def _take(self, nbytes: int, gasp: bool) -> Slot:
        """A locked slot: a free one, else the oldest that can be spared, else a new one, else any but the last."""
        committed = sorted((s for s in self.slots if s.stamp), key=_step_of)
        complete = self.complete()
        keep = {complete[-1]} if complete else set()
        pending = self._pending(committed)
        most = 3 + any(s.stamp.pinned for s in pending if s.stamp)  # it may wait for a drain to end, as others go on
        keep |= {s.stamp.checkpoint for s in committed[-1:] + pending if s.stamp}
        spare = [s for s in self.slots if s.stamp is None or s.stamp.checkpoint not in keep]
        spare.sort(key=_step_of)
        locked = [s for s in spare if s.lock()]
        if locked:
            self._give_back(locked[1:])
            return locked[0]
        within = self.limit is None or (len(self.slots) + 1) * nbytes <= self.limit
        if len(self.slots) < most and within and (gasp or self._spares(nbytes)):
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
        for slot in sorted(committed, key=lambda s: s in pending):  # what was asked for on storage last
            others = [s for s in committed if s is not slot and s.stamp and s.stamp.checkpoint in complete]
            if others and slot.lock():
                return slot
        raise MemoryStoreError(
            f"memory store {self.job.path}: every snapshot is being read and there is no room for one more of "
            f"{nbytes:,} bytes: give it more, raise memory_limit, or lower memory_headroom"
        )

    def _give_back(self, surplus: list[Slot]) -> None:
        """Unlock what wasn't needed; free the third slot when no drain has needed it for a while."""
        self._unneeded = self._unneeded + 1 if surplus else 0
        for slot in surplus:
            slot.unlock()
            if len(self.slots) > 2 and self._unneeded >= 16:
                if slot.stamp is not None:
                    self._uncommit(slot)
                slot.path.unlink()
                slot.close()
                self.slots.remove(slot)

    def complete(self) -> list[CheckpointKey]:
        """Step and incarnation of the snapshots that every rank of this node has, oldest first."""
        ranks: dict[CheckpointKey, set[int]] = {}
        there = set()
        for stamp, path in self.job.snapshots.shard_ids(self._known):
            there.add(str(path))
            ranks.setdefault(stamp.checkpoint, set()).add(stamp.rank)
        self._known = {path: seen for path, seen in self._known.items() if path in there}
        return sorted(key for key, have in ranks.items() if have.issuperset(self.local_ranks))

    def _pending(self, committed: list[Slot]) -> list[Slot]:
        """The newest snapshot that is to go to storage, and the oldest that is to be pinned, if they aren't there yet.

        Who pins waits for the older one, so that there is one at a time.
        """
        lacking = self._lacking(committed)
        return lacking[-1:] + [s for s in lacking if s.stamp and s.stamp.pinned][:1]

    def to_pin(self, newest: ShardId) -> list[ShardId]:
        """What is older than ``newest``, is to be pinned on storage, and isn't there yet; oldest first."""
        at, start = newest.step, newest.incarnation
        committed = sorted((s for s in self.slots if s.stamp and s.stamp.step < at), key=_step_of)
        pins = [s.stamp for s in self._lacking(committed) if s.stamp and s.stamp.pinned]
        return [stamp for stamp in pins if not self._abandoned(stamp, at, start)]

    def _lacking(self, committed: list[Slot]) -> list[Slot]:
        """Those that are to go to storage, and are not there yet."""
        durable = self.job.notes.durable()
        return [s for s in committed if s.stamp and s.stamp.persist and (durable is None or s.stamp.step > durable)]

    def _uncommit(self, slot: Slot) -> None:
        """Make a snapshot's file a free one. Whoever has it open reads on; nobody finds it any more."""
        directory = slot.path.parent
        if directory == self.job.paths.slots:
            return
        slot.path.with_suffix(".json").unlink(missing_ok=True)
        self._park(slot)
        _remove_empty(directory)

    def _park(self, slot: Slot) -> None:
        """Move a file back among the free ones, under a name that no other file can have."""
        free = self.job.paths.slots / f"rank-{self.rank:05d}-{os.fstat(slot.fd).st_ino}.slot"
        slot.stamp = None
        try:
            os.rename(slot.path, free)
        except OSError as error:
            raise MemoryStoreError(f"memory store {slot.path}: {describe_error(error)}") from error
        slot.path = free

    def commit(self, slot: Slot, stamp: ShardId, receipt: bytes) -> None:
        """Make the written slot the snapshot of ``stamp``. Visible from the moment its receipt has its name.

        Raises MemoryStoreError when that can't be; the slot is then free again.
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
            self._uncommit(older)  # of an earlier start, which has saved this step too
        while True:
            try:
                path.parent.mkdir(mode=0o700, exist_ok=True)
                os.rename(slot.path, path)
                break
            except (
                FileNotFoundError,
                FileExistsError,
            ):  # another rank has just removed it, empty
                if not slot.path.exists() or path.parent.is_file():
                    raise
        slot.path, slot.stamp = path, stamp
        reach("save.renamed", stamp.step)
        slot.unlock()  # before it can be found: a reader that finds it must be able to pin it
        self.write_receipt(stamp, receipt)

    def write_receipt(self, stamp: ShardId, receipt: bytes) -> None:
        """Put a committed snapshot's receipt in place, or replace it."""
        path = self.job.path / step_dir(stamp.step) / receipt_name(stamp.rank, stamp.world)
        temporary = path.with_name(f".{path.name}.tmp")
        try:
            with open(temporary, "wb", buffering=0) as file:
                half = len(receipt) // 2
                _write(file.fileno(), receipt[:half])
                reach("save.receipt", stamp.step)
                _write(file.fileno(), receipt[half:])
        except OSError as error:
            temporary.unlink(missing_ok=True)
            raise MemoryStoreError(f"memory store {path}: {describe_error(error)}") from error
        os.replace(temporary, path)
        reach("save.committed", stamp.step)

    def recover(self) -> None:
        """Begin again from the files, after a save broke off at an unknown point.

        Free files are removed, not used again: threads of the save that broke off may still be writing into one.
        """
        self.close()
        for path in matching(self.job.paths.slots, f"rank-{self.rank:05d}-*.slot"):
            path.unlink(missing_ok=True)
        self.adopt()

    def give_up(self) -> None:
        """Make free files of all snapshots. Raises MemoryStoreError."""
        self.ready()
        for slot in self.slots:
            if slot.stamp is not None:
                self._uncommit(slot)

    def close(self) -> None:
        """Let go of all slots. Their files stay. Broken off by a signal handler, it may be called again."""
        self.ready()
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
