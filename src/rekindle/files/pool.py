"""Provides one process with slots to save files into: ready ones, recycled ones, new ones, within the limit."""

from __future__ import annotations

import itertools
import os
import time
from collections import deque
from contextlib import suppress

from rekindle.common.os_errors import describe_error
from rekindle.errors import MemoryStoreError
from rekindle.files.exclusive import Exclusive
from rekindle.files.quota import Quota
from rekindle.format.file_receipt import FileReceipt
from rekindle.memory.files_dir import FilesDir
from rekindle.memory.kept import Identity, KeptFile, key_of
from rekindle.memory.lock import Lock
from rekindle.memory.maker import SlotMaker
from rekindle.memory.pages import AT_ONCE, Pages
from rekindle.memory.room import Room
from rekindle.memory.slot import Slot

__all__ = ["Pool"]

_MOST_SPARES = 4
"""Slots that are made ahead at most, for programs that save files of several sizes in turn."""
_MOST_MAPPED = 16
"""Files in memory at most whose mapping is kept, for the time when their slots are used again. Each is an open file."""
_IDLE = 600.0
"""Seconds without a save after which slots that were made ahead go."""
_LET_GO = 10.0
"""Seconds that the thread which makes memory gets to let go of a slot."""


class Pool:
    """Owns the slots of one process. Thread-safe.

    A slot that ``take`` has returned is its caller's, until ``commit`` or ``give_back``.
    """

    def __init__(self, store: FilesDir, client: Lock, limit: int | None, quota: Quota) -> None:
        self._store, self._client, self._limit, self._quota = store, client, limit, quota
        self._lock = Exclusive()
        self._numbers = itertools.count()
        self._maker = SlotMaker(None)
        self._spares: list[Slot] = []
        self._mapped: list[Slot] = []
        """Slots that are files in memory now, the newest last."""
        self._used = time.monotonic()

    def take(self, target: str, nbytes: int) -> Slot:
        """Returns a locked slot for a file at ``target``, of ``nbytes``, mapped. Its memory may be yet to make.

        Raises MemoryStoreError when there is no room within the limits, OSError when memory was removed.
        """
        with self._lock.entered(), self._store.arranging():
            self._used = time.monotonic()
            self._quota.make_room(target, nbytes)
            slot = self._spare(nbytes) or self._make_room(nbytes)
            try:
                _fit(slot, nbytes)
            except BaseException as error:
                self._discard(slot)
                if isinstance(error, (OSError, ValueError)):
                    raise MemoryStoreError(f"memory store {self._store.path}: {describe_error(error)}") from error
                raise
            return slot

    def _spare(self, nbytes: int) -> Slot | None:
        """Returns the smallest spare slot that is neither too small nor much too large."""
        for slot in sorted(self._spares, key=lambda slot: slot.size):
            if nbytes <= slot.size <= max(2 * nbytes, AT_ONCE):
                self._spares.remove(slot)
                if self._maker.recall(slot, _LET_GO) and os.fstat(slot.fd).st_nlink and slot.lock():
                    return slot
                self._discard(slot)  # its file was removed with all of memory
        return None

    def _make_room(self, nbytes: int) -> Slot:
        """Returns a new slot, or that of the oldest file that storage has. Such files go until there is room."""
        lacking, why = self._shortage(nbytes)
        if not lacking:
            return self._new()
        self._store.kept.remove_superseded()
        stored = deque(self._store.kept.newest(stored=True))
        if lacking > sum(slot.size for slot in self._spares) + sum(map(self._store.bytes_of, stored)):
            raise MemoryStoreError(why)  # none of them goes in vain
        while lacking:
            if not (self._spares or stored):
                raise MemoryStoreError(why)
            freed = 0  # counted, as a look at all files for each of hundreds would take seconds
            while freed < lacking and (self._spares or stored):
                if self._spares:  # they are of another size
                    freed += self._spares[0].size
                    self._discard(self._spares.pop(0))
                    continue
                file = stored.popleft()
                nbytes_of_file = self._store.bytes_of(file)
                slot = self._recycled(file) if _suits(file, nbytes) else None
                if slot is not None and not self._shortage(nbytes - slot.size)[0]:
                    return slot
                if slot is not None:
                    self._discard(slot)
                else:
                    self._store.kept.remove(file)
                freed += nbytes_of_file
            lacking, why = self._shortage(nbytes)
        return self._new()

    def _shortage(self, more: int) -> tuple[int, str]:
        """Returns how many bytes have to go before ``more`` have room, and describes why; 0 if they have."""
        store = self._store
        held, promised = store.spoken_for()
        limit = store.total_bytes() // 2 if self._limit is None else self._limit
        if held + more > limit:
            return held + more - limit, (
                f"memory store {store.path}: {more:,} bytes more than the {held:,} that files take would exceed their "
                f"limit of {limit:,}, also without those that storage has: see 'rekindle ls --files', or raise "
                "the limit (rekindle.files.configure, else REKINDLE_FILES_LIMIT)"
            )
        free = store.free_bytes() - promised - Room().headroom(store)
        if more > max(free, 0):
            return more - free, (
                f"memory store {store.path}: {more:,} bytes don't fit into the {max(free, 0):,} that are free beside "
                "the headroom of other programs: make the file system larger (a container: --shm-size)"
            )
        return 0, ""

    def _new(self) -> Slot:
        path = self._store.new_slot(self._client, next(self._numbers))
        slot = Slot(path, os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
        slot.lock()
        return slot

    def _recycled(self, file: KeptFile) -> Slot | None:
        """Gives a file up and returns its slot, locked, with the mapping that this process has of it."""
        path = self._store.new_slot(self._client, next(self._numbers))
        fd = self._store.kept.recycle(file, path)
        if fd is None:
            return None
        slot, inode = Slot(path, fd), os.fstat(fd).st_ino
        for known in self._mapped:
            if os.fstat(known.fd).st_ino == inode:
                self._mapped.remove(known)
                slot.map, known.map = known.map, None
                known.close()
                break
        return slot

    def commit(self, slot: Slot, receipt: FileReceipt, stored: Identity | None) -> bool:
        """Makes a file in memory of a slot, and gives up the older ones of its path.

        One whose placeholder may be elsewhere by now is set aside.

        Raises OSError, BusyError, and MemoryStoreError where files of other processes have used up a limit meanwhile.
        What was ``stored`` before is no newer than one that storage lacks: then nothing is done, and False returned.
        """
        with self._lock.entered(), self._store.arranging():
            older = self._store.kept.files(key_of(receipt.target))
            if stored is not None and not all(file.is_stored() for file in older):
                return False
            for file in older:  # first: whoever is killed between the two would leave it superseded
                self._store.kept.set_aside(file, receipt.mark)
            self._quota.make_room(receipt.target, receipt.nbytes)
            slot.unlock()  # before readers see the file; under the lock of the store nobody else touches it
            self._store.kept.commit(slot.path, receipt, stored)
            if slot.size > AT_ONCE:
                self._mapped.append(slot)
            else:
                slot.close()
            for file in older:
                self._give_up(file)
            for known in self._mapped[:-_MOST_MAPPED]:
                self._mapped.remove(known)
                self._maker.drop(known)
            return True

    def _give_up(self, file: KeptFile) -> None:
        """Gives a file up, for a spare slot where this process has it mapped."""
        with suppress(FileNotFoundError):
            inode = file.data.stat().st_ino
            ours = any(os.fstat(known.fd).st_ino == inode for known in self._mapped)
            slot = self._recycled(file) if ours and len(self._spares) < _MOST_SPARES else None
            if slot is not None:
                slot.unlock()
                self._spares.append(slot)
                return
        self._store.kept.remove(file)

    def prepare(self, nbytes: int) -> None:
        """Has a slot made for the next file of this size, if it is large and there is room without giving up others.

        A failure is not reported: the next save makes what it needs itself.
        """
        if nbytes <= AT_ONCE:
            return
        with suppress(OSError, MemoryStoreError), self._lock.entered(), self._store.arranging():
            if any(nbytes <= slot.size <= 2 * nbytes for slot in self._spares):
                return
            if len(self._spares) == _MOST_SPARES:
                self._discard(self._spares.pop(0))
            if not self._shortage(nbytes)[0]:
                slot = self._new()
                os.ftruncate(slot.fd, nbytes)
                self._spares.append(slot)
                self._maker.make(slot, nbytes)

    def give_back(self, slot: Slot) -> None:
        """Removes a slot whose file was not committed. One that was, before an interrupt, stays."""
        with self._lock.entered():
            if slot not in self._mapped:
                self._discard(slot)

    def tidy(self) -> None:
        """Lets go of memory that others have given up, and of spare slots that nobody used for long."""
        with self._lock.entered():
            idle = time.monotonic() - self._used > _IDLE
            gone = [slot for slot in self._spares if idle or not os.fstat(slot.fd).st_nlink]
            for slot in gone:
                self._spares.remove(slot)
                self._discard(slot)
            for known in [known for known in self._mapped if not os.fstat(known.fd).st_nlink]:
                self._mapped.remove(known)
                self._maker.drop(known)

    def close(self) -> None:
        """Gives back the slots that were made ahead."""
        with self._lock.entered():
            while self._spares:
                self._discard(self._spares.pop())
            while self._mapped:
                self._maker.drop(self._mapped.pop())

    def _discard(self, slot: Slot) -> None:
        with suppress(OSError):
            slot.path.unlink(missing_ok=True)
        if self._maker.recall(slot, _LET_GO):
            self._maker.drop(slot)


def _suits(file: KeptFile, nbytes: int) -> bool:
    """True if a file's slot is worth to be used again for ``nbytes``."""
    try:
        size = file.data.stat().st_size
    except OSError:
        return False
    return size > AT_ONCE and nbytes <= size <= 2 * nbytes


def _fit(slot: Slot, nbytes: int) -> None:
    """Gives a locked slot's file its size, and maps it."""
    pages = slot.map
    if not nbytes or pages is None or len(pages) < nbytes or (pages.cut and nbytes > pages.made):
        slot.map = None
    if slot.size != nbytes:
        os.ftruncate(slot.fd, nbytes)
    if slot.map is not None:
        if len(slot.map) > nbytes:
            slot.map.made, slot.map.cut = min(slot.map.made, nbytes), True
    elif nbytes:
        slot.map = Pages(slot.fd, nbytes)
