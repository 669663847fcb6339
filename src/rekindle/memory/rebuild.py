"""Rebuilds a dead rank's snapshot from its local state, if other ranks' snapshots of the step have the rest."""

from __future__ import annotations

import logging
from bisect import bisect
from collections.abc import Collection, Sequence
from functools import partial
from typing import Any

from rekindle.errors import FormatError, RekindleError
from rekindle.format.boxes import uncovered
from rekindle.format.layout import Chunk, Layout, block_ranges
from rekindle.format.lineage import CheckpointKey, ShardId
from rekindle.format.names import receipt_name, step_dir
from rekindle.format.receipt import Receipt, checksum
from rekindle.format.shard import OpenShard
from rekindle.memory.elsewhere import Elsewhere
from rekindle.memory.infer import infer_local_state
from rekindle.memory.job_dir import JobDir
from rekindle.memory.local_state import LocalFiles, LocalState, LocalStatePlan, padded, read_local_files
from rekindle.memory.slot import Slot
from rekindle.memory.slots import Slots

__all__ = ["rebuild", "rebuild_dead_ranks"]

log = logging.getLogger("rekindle")


def rebuild(job: JobDir, slots: Slots, elsewhere: Elsewhere) -> list[int]:
    """Rebuilds snapshots of the rank's newest steps, and returns these steps.

    The caller must hold the rank's lock. A step that can't be rebuilt is skipped, with a warning if something failed.
    """
    rank, made = slots.rank, []
    try:
        files = read_local_files(job.paths, rank)
    except FormatError as error:
        log.warning("%s", error)
        return []
    if files is None:
        return []
    own = {stamp.checkpoint for stamp, _ in job.snapshots.shard_ids() if stamp.rank == rank}
    for state in _states(job, rank, files, own, elsewhere):
        try:
            if _rebuild_step(job, slots, files.plan, state, elsewhere):
                made.append(state.stamp.step)
        except (OSError, RekindleError) as error:
            log.warning("step %d of rank %d can't be rebuilt from its local state: %s", state.stamp.step, rank, error)
    return made


def _states(
    job: JobDir, rank: int, files: LocalFiles, own: Collection[CheckpointKey], elsewhere: Elsewhere
) -> list[LocalState]:
    """Returns the local states of steps of which the rank has no snapshot, ``own`` ones left out; oldest first.

    Those of a start before that of a snapshot are left out, too: to rebuild one would free the newer snapshot.
    """
    known = {*own, *(state.stamp.checkpoint for state in files.states)}
    states = [state for state in files.states[::-1] if state.stamp.checkpoint not in own]
    if files.before is not None and files.before.stamp.checkpoint not in known:
        inferred = infer_local_state(job, files, rank, elsewhere)
        if inferred is not None:
            states.append(inferred)
    newest = max((key.incarnation.generation for key in own), default=0)
    return [state for state in states if state.stamp.incarnation.generation >= newest]


def rebuild_dead_ranks(job: JobDir, elsewhere: Elsewhere) -> None:
    """Rebuilds the newest snapshots of all ranks of this node after their trainers died, so that they reach storage.

    A restarted rank would do it too, but the node may be gone before there is one. Uses no memory beyond the files that
    the ranks have already. A failure is logged.
    """
    try:
        info = job.read_job()
    except FormatError as error:
        log.warning("the newest snapshots of the dead ranks are not rebuilt: %s", error)
        return
    for rank in info.ranks if info is not None else []:
        assert info is not None
        if not job.paths.local_state_plan(rank).exists():
            continue
        slots = Slots(job, rank, info.world, info.ranks, limit=0)
        try:
            lock = job.lock_rank(rank, 0.0)
            try:
                slots.adopt()
                rebuild(job, slots, elsewhere)
            finally:
                slots.close()
                lock.release()
        except (OSError, RekindleError) as error:  # also a BusyError: the rank is back
            log.warning("rank %d: its newest snapshots are not rebuilt: %s", rank, error)


def _rebuild_step(job: JobDir, slots: Slots, plan: LocalStatePlan, state: LocalState, elsewhere: Elsewhere) -> bool:
    """Commits a snapshot of the local state. False if no other ranks have the rest of the step."""
    kept = set(plan.blocks)
    ours: list[tuple[Chunk, int]] = []
    wanted: list[Chunk] = []
    block = 0
    for chunk in plan.layout.chunks:
        if block in kept or not chunk.nbytes:
            ours.append((chunk, block))
        else:
            wanted.append(chunk)
        block += len(block_ranges(chunk))
    ranks = sorted({rank for chunk in wanted for rank in plan.replicas.get(chunk.name, [])} - {state.stamp.rank})
    if not _others_have(job, state.stamp, wanted, ranks, elsewhere):
        return False
    layout = Layout.build(chunk for chunk, _ in ours)
    slot = slots.acquire(state.stamp.step, state.stamp.incarnation, layout.file_bytes)
    try:
        receipt = _fill(slot, layout, plan, state, {(chunk.name, chunk.offsets): block for chunk, block in ours})
    except BaseException:
        slot.unlock()
        raise
    slots.commit(slot, state.stamp, receipt)
    log.info("rank %d: step %d was rebuilt from its local state and its replicas", slots.rank, state.stamp.step)
    return True


def _others_have(job: JobDir, stamp: ShardId, wanted: list[Chunk], ranks: Sequence[int], elsewhere: Elsewhere) -> bool:
    """True if snapshots of the step by ``ranks`` have all of ``wanted``: this node's first, then other nodes'.

    No more are looked at than it takes.
    """
    there: dict[str, list[Chunk]] = {}
    begin = bisect(ranks, stamp.rank)  # of other nodes each rank asks another one first
    for chunks_of, order in ((partial(_chunks, job), ranks), (elsewhere.chunks, [*ranks[begin:], *ranks[:begin]])):
        for rank in order:
            if not wanted:
                return True
            for chunk in chunks_of(stamp, rank):
                there.setdefault(chunk.name, []).append(chunk)
            wanted = [chunk for chunk in wanted if not _covered(chunk, there.get(chunk.name, []))]
    return not wanted


def _covered(chunk: Chunk, others: list[Chunk]) -> bool:
    alike = [c for c in others if not c.own and (c.dtype, c.global_shape) == (chunk.dtype, chunk.global_shape)]
    return not uncovered(chunk.box, [other.box for other in alike])


def _chunks(job: JobDir, stamp: ShardId, rank: int) -> tuple[Chunk, ...]:
    try:
        path = job.path / step_dir(stamp.step) / receipt_name(rank, stamp.world)
        with OpenShard.open(path, in_memory=True) as shard:
            return shard.receipt.layout.chunks if shard.receipt.stamp.checkpoint == stamp.checkpoint else ()
    except (FileNotFoundError, RekindleError):
        return ()


def _fill(
    slot: Slot, layout: Layout, plan: LocalStatePlan, state: LocalState, numbers: dict[tuple[str, Any], int]
) -> bytes:
    assert slot.map is not None
    base = len(layout.header)
    data = memoryview(slot.map)[base:]
    slot.map[:base] = layout.header
    places, at = {}, 0
    for number in plan.blocks:
        start, stop = plan.layout.blocks[number]
        places[number] = state.tensors[at : at + stop - start]
        at += padded(stop - start)
    sums = []
    for chunk in layout.chunks:
        if chunk.nbytes:
            piece = places[numbers[chunk.name, chunk.offsets]]
            data[chunk.start : chunk.stop] = piece
            sums.append(checksum(piece))
    return Receipt.encode(state.stamp, Receipt.static_part(layout, plan.structure), sums, state.values)
