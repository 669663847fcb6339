"""Copies live tensors into a shard, checksummed on the way: inside of ``step()``, or beside training.

Devices copy straight into page-locked memory, and training's next update waits for that on the device. Into other
memory they copy by way of ``rekindle.devices.bounce``, and the update waits on the host.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
import threading
import time
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import torch
import xxhash

from rekindle.common.environ import env_count
from rekindle.common.failpoints import reach
from rekindle.common.flag import Flag
from rekindle.common.workers import Workers
from rekindle.devices.batches import Pair
from rekindle.devices.bounce import copy_by_bounce
from rekindle.devices.events import STUCK, Event, wait_for_copy
from rekindle.devices.page_lock import locked_ranges
from rekindle.devices.streams import SideStreams, copy_now
from rekindle.devices.table import enter, has_queues
from rekindle.errors import RekindleError
from rekindle.format.layout import BLOCK
from rekindle.format.receipt import checksum
from rekindle.save.device_copies import DeviceCopies
from rekindle.save.plan import Batch, CopyPlan, MovedError, Unit, require_in_place
from rekindle.save.witness import PLACES, Look, Witness

__all__ = ["BEFORE", "Copying", "ShardWriter"]

BEFORE, _AFTER, _AT_UPDATE = range(PLACES)
"""Places of looks, which all may be waited for at the same time."""
_PIECE = 256 << 10
"""Bytes copied and then hashed while the processor's cache still has them.

With pieces of this size copying 1 GiB with its checksums took 2 % longer than copying alone on one thread and 12 % on
two; with pieces of 16 MiB it took 55 % longer.
"""


@dataclass
class _Target:
    """A buffer, and views into it for the copies of one plan. Kept from save to save."""

    plan: CopyPlan
    address: int
    data: memoryview
    sides: dict[int, list[Pair]]
    """Places and sources of the units that torch copies, by first byte: one of each, or as many as page locks."""
    direct: set[int]
    """Batches that a device copies straight into the buffer, by first byte."""
    anchor: object
    """Keeps the address valid."""

    def sides_of(self, batch: Batch) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Returns places and sources of a batch that torch copies."""
        sides = [pair for unit in batch.units for pair in self.sides[unit.start]]
        return [to for to, _ in sides], [source for _, source in sides]


class _BatchQueue:
    """Batches of which any number of threads take one after the other until none is left."""

    def __init__(self, work: Callable[[Batch], None], batches: Iterable[Batch]) -> None:
        self._work = work
        self._todo = deque(batches)
        self.left = len(self._todo)
        """Number of batches that are not done."""
        self._lock = threading.Lock()
        self._over = Flag()
        self._error: BaseException | None = None
        if not self.left:
            self._end()

    def help(self) -> None:
        """Take batches as long as there are any. ``wait`` raises what went wrong; interrupts are raised here too."""
        try:
            while self._error is None:
                try:
                    batch = self._todo.popleft()
                except IndexError:
                    return
                self._work(batch)
                with self._lock:
                    self.left -= 1
                    if not self.left:
                        self._end()
        except Exception as error:
            self.fail(error)
        except BaseException:  # a signal's handler may raise between any two instructions
            self.fail(RekindleError("the copy was interrupted"))
            raise

    @property
    def open(self) -> int:
        """Number of batches that nobody has taken yet."""
        return len(self._todo)

    def fail(self, error: BaseException) -> None:
        """Give up: ``wait`` raises ``error``."""
        self._error = error
        self._end()

    def _end(self) -> None:
        self._work = _nothing  # else this and whose work it is would keep each other alive, and the state with them
        self._over.set()

    def wait(self) -> None:
        """Wait for the batches that others have taken, and raise what went wrong."""
        if not self._over.wait(STUCK):
            raise RekindleError(f"a copy has not ended within {STUCK:.0f} s")
        if self._error is not None:
            raise self._error


def _nothing(batch: Batch) -> None:
    return None


class Copying:
    """The copying of one shard into a buffer. ``target`` is to be passed as ``cache`` next time.

    ``early`` comes first, by the thread that trains. Then any threads may call the others, at the same time too.
    Failures are raised by ``hold_update`` and ``finish``. A ``witness`` looks at what is copied late before the first
    copy and behind the last one, at all of it with ``whole``, and compares the copy with the first look, all of it with
    ``exact``.
    """

    def __init__(
        self,
        writer: ShardWriter,
        plan: CopyPlan,
        target: _Target,
        step: int,
        witness: Witness | None = None,
        *,
        whole: bool = False,
        exact: bool = False,
    ) -> None:
        self._writer, self._plan, self.target, self._step = writer, plan, target, step
        self.witness, self._whole, self._exact = witness, whole, exact
        self.before: Look | None = None
        """Look of the witness before the first copy."""
        self._after: Look | None = None
        self._at_update: Look | None = None
        self._looking = threading.Lock()
        self._sums = [""] * len(plan.layout.blocks)
        batches = plan.late or plan.early
        self._middle = batches[len(batches) // 2] if batches else None
        self._host = _BatchQueue(self._copy, (b for b in plan.late if b.on_host))
        self._bounced = _BatchQueue(self._bounce, (b for b in plan.late if self._is_bounced(b)))
        direct = [b for b in plan.late if self._is_direct(b)]
        aside = partial(_copy_aside, writer.streams, target)  # a method of this would keep it alive, and the state
        bounced = {b.device for b in plan.late if self._is_bounced(b)}
        self._early_seen = {b.device for b in direct} - bounced
        """Devices that are looked at behind the last copy as soon as that is queued."""
        look = partial(_look_aside, witness, whole, writer.streams, self._early_seen) if witness is not None else None
        self._copies = DeviceCopies(direct, aside, writer.window, look)
        self._last = direct[-1] if direct else None
        self._early: dict[int, Event | None] = {}
        """Events of the batches that devices copy on training's own streams, by first byte."""
        self._arrived = _BatchQueue(self._hash, [b for b in plan.early if self._is_direct(b)] + direct)
        self.holds_all = not direct
        """True if everything is in the buffer once ``hold_update`` has returned; else a device may still be copying."""
        self._began: float | None = time.monotonic()
        """Time at which training went on; None once an update has come."""

    @property
    def left(self) -> int:
        """Number of batches, of those that are copied beside training, that are not in the buffer yet."""
        return self._host.left + self._bounced.left + self._arrived.left

    def early(self) -> None:
        """Copy what may change as soon as training goes on, and let side streams go on from where training is."""
        early, streams = self._plan.early, self._writer.streams
        if self.witness is not None:
            self.before = self.witness.look(BEFORE, whole=self._whole)
        for batch in early:
            if self._is_direct(batch):
                self._early[batch.start] = copy_now(batch.device, *self.target.sides_of(batch))
        streams.catch_up({b.device for b in early + self._plan.late if has_queues(b.device)})
        self._writer.all_hands(_BatchQueue(self._copy, (b for b in early if b.on_host)))
        self._writer.all_hands(_BatchQueue(self._bounce, (b for b in early if self._is_bounced(b))))

    def queue(self) -> None:
        """Queue the first of the devices' copies. Waits for none of them."""
        self._copies.queue_ahead()

    def help(self) -> None:
        """Copy what is left, in this thread alone."""
        for left in (self._host, self._bounced, self._arrived):
            left.help()

    def note_update(self) -> None:
        """Note that an update has come: the next copies are spread over as much time as there was for these."""
        if self._began is not None:
            self._writer.window, self._began = time.monotonic() - self._began, None

    def hold_update(self) -> None:
        """Copy what is left, or let the device wait until it is copied: after this the state may change."""
        self._copies.queue_all()
        self._writer.all_hands(self._host)
        self._writer.all_hands(self._bounced)
        seen = [event for look in self._look_again() for event in look.events]
        self._writer.streams.make_training_wait([*self._copies.last(), *seen])

    def _look_again(self) -> list[Look]:
        """Look behind the last copy, once: all copies have been queued, and those on the host have ended."""
        with self._looking:
            if self._after is None and self.witness is not None:
                streams, seen = self._writer.streams, self._early_seen
                self._after = self.witness.look(
                    _AFTER, whole=self._whole, on=streams.aside, only=lambda device: device not in seen
                )
            return [look for look in (self._after, self._copies.after) if look is not None]

    def changed(self) -> set[str]:
        """Returns the tensors that were changed while they were copied, once ``finish`` has seen all of them arrive."""
        found = [unit for look in self._look_again() for unit in self._differing(look)]
        if self.witness is not None:
            assert self.before is not None
            found += self.witness.torn(self.before, self.target.address, self._sums, exact=self._exact)
        return self._names(found)

    def look_at_update(self) -> None:
        """Look once more, on the caller's streams, before the first update: ``changed_later`` tells what was found."""
        if self.witness is not None:
            self._at_update = self.witness.look(_AT_UPDATE, whole=self._whole)

    def changed_later(self) -> set[str]:
        """Returns the tensors that were changed until ``look_at_update``, the copy being right or not."""
        return self._names(self._differing(self._at_update)) if self._at_update is not None else set()

    def _differing(self, later: Look) -> list[Unit]:
        assert self.before is not None
        return later.differing(self.before)

    def _names(self, units: Iterable[Unit]) -> set[str]:
        return {self._plan.layout.tensor_of(unit.block) for unit in units}

    def finish(self) -> list[str]:
        """Returns the checksums of everything, once it is in the buffer."""
        self._copies.queue_all()
        for left in (self._host, self._bounced, self._arrived):
            self._writer.all_hands(left)
        return self._sums

    def _is_direct(self, batch: Batch) -> bool:
        return batch.start in self.target.direct

    def _is_bounced(self, batch: Batch) -> bool:
        return not (batch.on_host or self._is_direct(batch))

    def _copy(self, batch: Batch) -> None:
        """Copy and hash what lies in the host's memory."""
        for unit in batch.units:
            if unit.in_order:
                self._sums[unit.block] = _move(unit, self.target)
            else:
                ((to, source),) = self.target.sides[unit.start]
                require_in_place([unit])  # torch would read on behind memory that has become smaller
                with torch.no_grad():
                    to.copy_(source)
                require_in_place([unit])
                self._hash_unit(unit)
        self._reach_middle(batch)

    def _bounce(self, batch: Batch) -> None:
        """Copy what is on a device into memory that is not page-locked, and hash it."""
        require_in_place(batch.units)
        copy = partial(self._writer.streams.copy_aside, batch.device)
        copy_by_bounce(batch.device, copy, *self.target.sides_of(batch), rescue=self._writer.rescue)
        self._hash_units(batch)

    def _hash(self, batch: Batch) -> None:
        """Hash what a device copies, once it has."""
        first = batch.start
        if first not in self._early:
            wait_for_copy(self._copies.await_queued(batch))
            if batch is self._last:
                for look in filter(None, (self.before, self._copies.after)):
                    look.read()  # before the hashing: a device that fails answers no more
        elif (event := self._early[first]) is not None:
            wait_for_copy(event)
        self._hash_units(batch)

    def _hash_units(self, batch: Batch) -> None:
        for unit in batch.units:
            self._hash_unit(unit)
        self._reach_middle(batch)

    def _hash_unit(self, unit: Unit) -> None:
        stop = unit.start + unit.nbytes
        for number, at in enumerate(range(unit.start, stop, BLOCK), unit.block):
            self._sums[number] = checksum(self.target.data[at : min(at + BLOCK, stop)])

    def _reach_middle(self, batch: Batch) -> None:
        if batch is self._middle:
            reach("save.copying", self._step)


def _copy_aside(streams: SideStreams, target: _Target, batch: Batch) -> Event:
    return streams.copy_aside(batch.device, *target.sides_of(batch))


def _look_aside(witness: Witness, whole: bool, streams: SideStreams, devices: Collection[torch.device]) -> Look:
    return witness.look(_AFTER, whole=whole, on=streams.aside, only=lambda device: device in devices)


def _move(unit: Unit, target: _Target) -> str:
    """Copy a unit and return its checksum. Large copies and hashes run outside the interpreter lock."""
    start, stop = unit.start, unit.start + unit.nbytes
    where, first = unit.source.data_ptr, unit.address - unit.offset
    if unit.nbytes <= _PIECE and where() == first:
        ctypes.memmove(target.address + start, unit.address, unit.nbytes)
        return checksum(target.data[start:stop])
    state = xxhash.xxh3_64()
    for at in range(start, stop, _PIECE):
        if where() != first:  # reading on would end the process
            raise MovedError([unit])
        end = min(at + _PIECE, stop)
        ctypes.memmove(target.address + at, unit.address + at - start, end - at)
        state.update(target.data[at:end])
    return state.hexdigest()


class ShardWriter:
    """The threads that copy a plan's tensors into buffers; each hashes what it has just copied."""

    def __init__(self, *, rescue: bool = False) -> None:
        """``rescue``: True for copies after a fault, which share nothing with those that may be stuck."""
        self.rescue = rescue
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        # The trainer waits meanwhile, so its cores are free; ranks on the same node save at the same time.
        self._helpers = max(1, min(8, cores // env_count("LOCAL_WORLD_SIZE"))) - 1
        self._threads = Workers(max(1, self._helpers), "rekindle-copy")
        # One, for training needs its cores. Not of lower priority: where training keeps them all busy, most would be
        # left to do when the update waits, and training is slowed by as much either way.
        self._behind = Workers(1, "rekindle-behind")
        self._devices: set[torch.device] = set()
        """Devices of the plans so far."""
        self.streams = SideStreams()
        self.window = 0.0
        """Seconds from the newest snapshot until the update that came next; 0 before the first."""

    def start(
        self,
        plan: CopyPlan,
        buffer: mmap.mmap,
        cache: object,
        step: int,
        witness: Witness | None = None,
        *,
        whole: bool = False,
        exact: bool = False,
    ) -> Copying:
        """Begin to fill ``buffer``, of at least ``plan.layout.file_bytes`` bytes. What may change at once is copied."""
        target = cache if isinstance(cache, _Target) and cache.plan is plan else self._target(plan, buffer)
        copying = Copying(self, plan, target, step, witness, whole=whole, exact=exact)
        copying.early()
        return copying

    def write(self, plan: CopyPlan, buffer: mmap.mmap, cache: object, step: int) -> tuple[object, list[str]]:
        """Fill ``buffer`` with the shard. Returns what to pass as ``cache`` next time, and the checksums."""
        copying = self.start(plan, buffer, cache, step)
        return copying.target, copying.finish()

    def _target(self, plan: CopyPlan, buffer: mmap.mmap) -> _Target:
        self._devices |= {batch.device for batch in plan.early + plan.late if not batch.on_host}
        return _target(plan, buffer)

    def _entered(self, work: Callable[[], object]) -> object:
        """Do ``work`` on the devices: a thread is on the first one of each kind, which may be somebody else's."""
        enter(self._devices)
        return work()

    def behind(self, work: Callable[[], object]) -> Future[object]:
        """Do ``work`` in the one thread that runs beside training."""
        return self._behind.submit(partial(self._entered, work))

    def all_hands(self, queue: _BatchQueue) -> None:
        """Work off the queue with all threads, the caller's included. Raises what went wrong."""
        for _ in range(min(self._helpers, queue.open - 1)):
            with suppress(RuntimeError):  # the process ends: this thread does all
                self._threads.submit(partial(self._entered, queue.help))
        queue.help()
        queue.wait()

    def close(self) -> None:
        """Wait for the threads, and end them."""
        self._behind.close()
        self._threads.close()


def _target(plan: CopyPlan, buffer: mmap.mmap) -> _Target:
    base = len(plan.layout.header)
    buffer[:base] = plan.layout.header
    anchor = ctypes.c_char.from_buffer(buffer)
    batches = plan.early + plan.late
    by_torch = [unit for batch in batches for unit in batch.units if not (batch.on_host and unit.in_order)]
    sides = {unit.start: [(unit.view(buffer, base), unit.part())] for unit in by_torch}
    target = _Target(plan, ctypes.addressof(anchor) + base, memoryview(buffer)[base:], sides, set(), anchor)
    locked = locked_ranges()
    for batch in batches:
        if not batch.on_host and (cut := _cut_at_locks(target, batch, locked)) is not None:
            target.direct.add(batch.start)
            sides.update(cut)
    return target


def _cut_at_locks(target: _Target, batch: Batch, locked: list[tuple[int, int]]) -> dict[int, list[Pair]] | None:
    """Returns sides of units that lie in several page locks, cut where one ends: a copy across that end may fail.

    None if the batch's place is not page-locked, or what torch brings into order, or an element, would have to be cut.
    """
    if not has_queues(batch.device):
        return {}  # torch copies, and the host waits, whatever memory it is
    found = {}
    for unit in batch.units:
        start = target.address + unit.start
        ends = _ends_of_locks(start, start + unit.nbytes, locked)
        if ends is None or (ends and not unit.in_order) or any((end - start) % unit.source.itemsize for end in ends):
            return None
        if ends:
            ((place, source),) = target.sides[unit.start]
            edges = [0, *((end - start) // source.itemsize for end in ends), len(source)]
            found[unit.start] = [(place[a:b], source[a:b]) for a, b in pairwise(edges)]
    return found


def _ends_of_locks(start: int, stop: int, locked: list[tuple[int, int]]) -> list[int] | None:
    """Returns the ends of page locks between two addresses; None if not all between them is page-locked."""
    ends = [start]
    while ends[-1] < stop:
        found = bisect_right(locked, (ends[-1], sys.maxsize)) - 1
        if found < 0 or locked[found][1] <= ends[-1]:
            return None
        ends.append(locked[found][1])
    return ends[1:-1]
