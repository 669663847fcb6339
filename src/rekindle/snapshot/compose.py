"""A dead rank's snapshot, put together from its own small state and from a replica's snapshot of the same step."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Iterable
from contextlib import ExitStack

from rekindle.errors import FormatError, RekindleError
from rekindle.snapshot.documents import Receipt, checksum
from rekindle.snapshot.infer import infer
from rekindle.snapshot.layout import Chunk, blocks
from rekindle.snapshot.lineage import Stamp
from rekindle.snapshot.memory import JobDir
from rekindle.snapshot.names import receipt_name, step_dir
from rekindle.snapshot.shard import OpenShard
from rekindle.snapshot.slots import Slot, Slots
from rekindle.snapshot.small import Half, SmallPlan, padded, read_plan, read_smalls

__all__ = ["compose", "compose_for_the_dead"]

log = logging.getLogger("rekindle")

_Source = tuple[OpenShard, int, Chunk]
"""A replica's shard, the number of a tensor's first block there, and the tensor's chunk."""


def compose(job: JobDir, slots: Slots) -> list[int]:
    """Put together what can be of the rank's newest steps. Steps that have a snapshot now and had none.

    For whoever holds the rank's lock. A step that can't be had is left out, with a line in the log.
    """
    rank, made = slots.rank, []
    try:
        plan = read_plan(job, rank)
    except FormatError as error:
        log.warning("%s", error)
        return []
    if plan is None:
        return []
    own = {stamp.key for stamp, _ in job.stamps() if stamp.rank == rank}
    halves = [half for half in read_smalls(job, rank)[::-1] if half.plan == plan.digest]
    inferred = infer(job, plan, rank)
    if inferred is not None and all(half.stamp.key != inferred.stamp.key for half in halves):
        halves.append(inferred)
    for half in halves:
        if half.stamp.key in own:
            continue
        try:
            if _compose(job, slots, plan, half):
                made.append(half.stamp.step)
        except (OSError, RekindleError) as error:
            log.warning("step %d of rank %d can't be put together: %s", half.stamp.step, rank, error)
    return made


def compose_for_the_dead(job: JobDir) -> None:
    """``compose`` for all ranks of this node, whose trainers have gone: so that storage gets what they had secured.

    A restarted rank would do it too; the node may be gone before there is one. Takes no memory but what the ranks'
    files have already.
    """
    info = job.read_job()
    for rank in info.ranks if info is not None else []:
        assert info is not None
        if not job.small_plan(rank).exists():
            continue
        slots = Slots(job, rank, info.world, info.ranks, limit=0)
        try:
            lock = job.lock_rank(rank, 0.0)
            try:
                slots.adopt()
                compose(job, slots)
            finally:
                slots.close()
                lock.release()
        except (OSError, RekindleError) as error:  # a BusyError, too: the rank has come back
            log.warning("rank %d: its newest steps are left as they are: %s", rank, error)


def _compose(job: JobDir, slots: Slots, plan: SmallPlan, half: Half) -> bool:
    kept = set(plan.blocks)
    wanted, block = [], 0
    for chunk in plan.layout.chunks:
        count = len(blocks(chunk))
        if count and block not in kept:
            wanted.append((chunk, block))
        block += count
    with ExitStack() as pins:
        sources = _sources(job, half.stamp, plan, (chunk for chunk, _ in wanted), pins)
        if sources is None:
            return False
        slot = slots.acquire(half.stamp.step, half.stamp.incarnation, len(plan.layout.header) + plan.layout.nbytes)
        try:
            receipt = _fill(slot, plan, half, wanted, sources)
        except BaseException:
            slot.unlock()
            raise
        slots.commit(slot, half.stamp, receipt)
    log.info("rank %d: step %d was put together from its replicas and its small state", slots.rank, half.stamp.step)
    return True


def _fill(
    slot: Slot, plan: SmallPlan, half: Half, wanted: list[tuple[Chunk, int]], sources: dict[str, _Source]
) -> bytes:
    assert slot.map is not None
    base = len(plan.layout.header)
    data = memoryview(slot.map)[base:]
    slot.map[:base] = plan.layout.header
    sums = [""] * len(plan.layout.blocks)
    at = 0
    for number in plan.blocks:
        start, stop = plan.layout.blocks[number]
        piece = half.tensors[at : at + stop - start]
        data[start:stop] = piece
        sums[number] = checksum(piece)
        at += padded(stop - start)
    for chunk, first in wanted:
        _fetch(sources[chunk.name], chunk, data, sums, first)
    return Receipt.encode(half.stamp, plan.static, sums, half.values)


def _sources(
    job: JobDir, stamp: Stamp, plan: SmallPlan, chunks: Iterable[Chunk], pins: ExitStack
) -> dict[str, _Source] | None:
    """By tensor; None if one is nowhere to be had."""
    shards: dict[int, dict[str, _Source]] = {}
    found = {}
    for chunk in chunks:
        for rank in plan.replicas.get(chunk.name, []):
            if rank not in shards:
                shards[rank] = _table(job, stamp, rank, pins)
            entry = shards[rank].get(chunk.name)
            if entry is not None and (entry[2].sizes, entry[2].dtype) == (chunk.sizes, chunk.dtype):
                found[chunk.name] = entry
                break
        else:
            return None
    return found


def _table(job: JobDir, stamp: Stamp, rank: int, pins: ExitStack) -> dict[str, _Source]:
    if rank == stamp.rank:
        return {}
    try:
        shard = pins.enter_context(
            OpenShard.open(job.path / step_dir(stamp.step) / receipt_name(rank, stamp.world), in_memory=True)
        )
    except (FileNotFoundError, RekindleError):
        return {}
    if shard.receipt.stamp.key != stamp.key:
        return {}
    table, block = {}, 0
    for chunk in shard.receipt.layout.chunks:
        table[chunk.name] = shard, block, chunk
        block += len(blocks(chunk))
    return table


def _fetch(source: _Source, chunk: Chunk, data: memoryview, sums: list[str], first: int) -> None:
    """Copy one tensor's bytes. Raises CorruptError when they differ from the replica's checksums."""
    shard, block, theirs = source
    mapped = shard.map()
    for number, (start, stop) in enumerate(blocks(chunk)):
        at = shard.receipt.header_bytes + theirs.start + start - chunk.start
        place = data[start:stop]
        address = ctypes.addressof(ctypes.c_char.from_buffer(place))
        ctypes.memmove(address, ctypes.addressof(ctypes.c_char.from_buffer(mapped, at)), stop - start)
        sums[first + number] = checksum(place)
        if sums[first + number] != shard.receipt.checksums[block + number]:
            raise shard.complain(block + number)
