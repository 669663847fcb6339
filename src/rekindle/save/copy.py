"""Copies live tensors into a shard, checksummed on the way: inside of ``step()``, or beside training."""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch
import xxhash

from rekindle.common.environ import env_count
from rekindle.common.failpoints import reach
from rekindle.errors import RekindleError
from rekindle.format.layout import BLOCK
from rekindle.format.receipt import checksum
from rekindle.save.plan import Batch, CopyPlan, Unit
from rekindle.state.device import Event, SideStreams, wait_for_event

__all__ = ["Copying", "ShardWriter", "checksum_late_blocks"]

_PIECE = 256 << 10
"""Bytes copied and then hashed while the processor's cache still has them.

With pieces of this size copying 1 GiB with its checksums took 2 % longer than copying alone on one thread and 12 % on
two; with pieces of 16 MiB it took 55 % longer.
"""
_STUCK = 600.0
"""Seconds after which a copy that doesn't end counts as failed."""


@dataclass
class _Target:
    """A buffer, and views into it for the copies of one plan. Kept from save to save."""

    plan: CopyPlan
    address: int
    data: memoryview
    views: dict[int, torch.Tensor]
    """Views of the units that torch copies, by first byte."""
    anchor: object
    """Keeps the address valid."""


class _BatchQueue:
    """Batches of which any number of threads take one after the other until none is left."""

    def __init__(self, work: Callable[[Batch], None], batches: Iterable[Batch]) -> None:
        self._work = work
        self._todo = deque(batches)
        self._left = len(self._todo)
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._error: BaseException | None = None
        if not self._left:
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
                    self._left -= 1
                    if not self._left:
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
        if not self._over.wait(_STUCK):
            raise RekindleError(f"a copy has not ended within {_STUCK:.0f} s")
        if self._error is not None:
            raise self._error


def _nothing(batch: Batch) -> None:
    return None


class Copying:
    """The copying of one shard into a buffer. ``target`` is to be passed as ``cache`` next time.

    ``early`` comes first, by the thread that trains. Then any threads may call the others, at the same time too.
    Failures are raised by ``hold_update`` and ``finish``.
    """

    def __init__(self, writer: ShardWriter, plan: CopyPlan, target: _Target, step: int) -> None:
        self._writer, self._plan, self.target, self._step = writer, plan, target, step
        self._sums = [""] * len(plan.layout.blocks)
        batches = plan.late or plan.early
        self._middle = batches[len(batches) // 2] if batches else None
        self._host = _BatchQueue(self._copy, (b for b in plan.late if _on_host(b)))
        on_device = [b for b in plan.early + plan.late if not _on_host(b)]
        self._device = _BatchQueue(self._hash, on_device)
        self._events: dict[int, Event | None] = {}
        """Events that tell when the device has copied a batch, by its first byte."""
        self._queueing = threading.Lock()
        self._queued = False
        self.holds_all = all(_on_host(b) for b in plan.late)
        """True if everything is in the buffer once ``hold_update`` has returned; else a device may still be copying."""

    def early(self) -> None:
        """Copy what may change as soon as training goes on, and let side streams go on from where training is."""
        early, streams = self._plan.early, self._writer.streams
        for batch in early:
            if not _on_host(batch):
                self._events[batch.units[0].start] = streams.copy_now(batch.device, *self._sides(batch))
        streams.catch_up({batch.device for batch in self._plan.late if not _on_host(batch)})
        queue = _BatchQueue(self._copy, (b for b in early if _on_host(b)))
        self._writer.all_hands(queue)

    def queue(self) -> None:
        """Queue the devices' copies, once. Waits for none of them."""
        with self._queueing:
            if self._queued:
                return
            self._queued = True
            try:
                for batch in self._plan.late:
                    if not _on_host(batch):
                        event = self._writer.streams.copy_aside(batch.device, *self._sides(batch))
                        self._events[batch.units[0].start] = event
            except BaseException as error:
                self._device.fail(RekindleError(f"copies from a device could not be queued: {error}"))
                raise

    def help(self) -> None:
        """Copy what is left on the host, in this thread alone."""
        self._host.help()

    def hold_update(self) -> None:
        """Copy what is left, or let the device wait until it is copied: after this the state may change."""
        self.queue()
        self._writer.all_hands(self._host)
        if not self.holds_all:
            self._writer.streams.make_training_wait()

    def finish(self) -> list[str]:
        """Returns the checksums of everything, once it is in the buffer."""
        self.queue()
        self._writer.all_hands(self._host)
        self._writer.all_hands(self._device)
        return self._sums

    def _sides(self, batch: Batch) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        return [self.target.views[unit.start] for unit in batch.units], [unit.source for unit in batch.units]

    def _copy(self, batch: Batch) -> None:
        """Copy and hash what lies in the host's memory."""
        for unit in batch.units:
            if unit.address:
                self._sums[unit.block] = _move(unit, self.target)
            else:
                with torch.no_grad():
                    self.target.views[unit.start].copy_(unit.source)
                self._hash_unit(unit)
        if batch is self._middle:
            reach("save.copying", self._step)

    def _hash(self, batch: Batch) -> None:
        """Hash what a device copies, once it has."""
        if not wait_for_event(self._events[batch.units[0].start], _STUCK):
            raise RekindleError(f"a device has not copied its part within {_STUCK:.0f} s")
        for unit in batch.units:
            self._hash_unit(unit)
        if batch is self._middle:
            reach("save.copying", self._step)

    def _hash_unit(self, unit: Unit) -> None:
        stop = unit.start + unit.nbytes
        for number, at in enumerate(range(unit.start, stop, BLOCK), unit.block):
            self._sums[number] = checksum(self.target.data[at : min(at + BLOCK, stop)])


def _on_host(batch: Batch) -> bool:
    return batch.device.type == "cpu"


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
            raise RekindleError("a tensor's memory was freed or resized while it was being copied")
        end = min(at + _PIECE, stop)
        ctypes.memmove(target.address + at, unit.address + at - start, end - at)
        state.update(target.data[at:end])
    return state.hexdigest()


class ShardWriter:
    """The threads that copy a plan's tensors into buffers; each hashes what it has just copied."""

    def __init__(self) -> None:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        # The trainer waits meanwhile, so its cores are free; ranks on the same node save at the same time.
        self._helpers = max(1, min(8, cores // env_count("LOCAL_WORLD_SIZE"))) - 1
        self._threads = ThreadPoolExecutor(max(1, self._helpers), thread_name_prefix="rekindle-copy")
        # One, for training needs its cores. Not of lower priority: where training keeps them all busy, most would be
        # left to do when the update waits, and training is slowed by as much either way.
        self._behind = ThreadPoolExecutor(1, thread_name_prefix="rekindle-behind")
        self.streams = SideStreams()

    def start(self, plan: CopyPlan, buffer: mmap.mmap, cache: object, step: int) -> Copying:
        """Begin to fill ``buffer``, of at least ``plan.layout.file_bytes`` bytes. What may change at once is copied."""
        target = cache if isinstance(cache, _Target) and cache.plan is plan else _target(plan, buffer)
        copying = Copying(self, plan, target, step)
        copying.early()
        return copying

    def write(self, plan: CopyPlan, buffer: mmap.mmap, cache: object, step: int) -> tuple[object, list[str]]:
        """Fill ``buffer`` with the shard. Returns what to pass as ``cache`` next time, and the checksums."""
        copying = self.start(plan, buffer, cache, step)
        return copying.target, copying.finish()

    def behind(self, work: Callable[[], object]) -> Future[object]:
        """Do ``work`` in the one thread that runs beside training."""
        return self._behind.submit(work)

    def all_hands(self, queue: _BatchQueue) -> None:
        """Work off the queue with all threads, the caller's included. Raises what went wrong."""
        for _ in range(min(self._helpers, queue.open - 1)):
            self._threads.submit(queue.help)
        queue.help()
        queue.wait()

    def close(self) -> None:
        """Wait for the threads, and end them."""
        self._behind.shutdown()
        self._threads.shutdown()


def _target(plan: CopyPlan, buffer: mmap.mmap) -> _Target:
    base = len(plan.layout.header)
    buffer[:base] = plan.layout.header
    anchor = ctypes.c_char.from_buffer(buffer)
    views = {u.start: u.view(buffer, base) for batch in plan.early + plan.late for u in batch.units if not u.address}
    return _Target(plan, ctypes.addressof(anchor) + base, memoryview(buffer)[base:], views, anchor)


def checksum_late_blocks(plan: CopyPlan) -> dict[int, str]:
    """Returns checksums by number, as in a receipt, of all blocks that are copied late, as they are now."""
    found = {}
    for unit in (unit for batch in plan.late for unit in batch.units):
        source = unit.source.resolve_conj().resolve_neg().cpu().contiguous()
        address = unit.address or source.data_ptr()
        data = memoryview((ctypes.c_char * unit.nbytes).from_address(address))
        for number, at in enumerate(range(0, unit.nbytes, BLOCK), unit.block):
            found[number] = checksum(data[at : at + BLOCK])
    return found
