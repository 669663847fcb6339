"""Another rank of a node, as the memory store shows it: its lock, its status page and its snapshots."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import rekindle
from rekindle.faults.guard import Guard
from rekindle.faults.peers import Peers
from rekindle.memory.slots import Slots
from rekindle.memory.status import SECURED, STABLE, StatusPage
from rekindle.testing import make_shard


@contextmanager
def peer(ckpt: rekindle.Checkpointer, guard: Guard, step: int, *, has: list[int], lives: bool = True) -> Iterator[None]:
    """Rank 1, which has secured ``step``, the newest of those that it ``has``."""
    job, stamp = ckpt._session.job_dir, ckpt._session.shard_id(step)
    slots = Slots(job, 1, 2, [1])
    for one in has:
        receipt, data = make_shard(replace(stamp, step=one, rank=1, world=2), {"x": b"private"})
        slot = slots.acquire(one, stamp.incarnation, receipt.file_bytes)
        assert slot.map is not None
        slot.map[: len(data)] = data
        slots.commit(slot, receipt.stamp, receipt.raw)
    lock = job.lock_rank(1, 10.0)
    page = StatusPage(job.paths.status_page(1), guard._generation)
    page.step = page.snapshot = page.secured = step
    page.phase, page.stage = STABLE, SECURED
    page.write()
    if not lives:
        lock.release()
    guard._peers = Peers(job, 0, [0, 1], guard._generation)
    try:
        yield
    finally:
        lock.release()
        slots.close()
