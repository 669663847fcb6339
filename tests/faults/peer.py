"""Another rank of a node, as the memory store shows it: its lock, its status page and its snapshots."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import rekindle
from rekindle.faults.guard import Guard
from rekindle.faults.peers import Peers
from rekindle.memory.job_dir import JobDir
from rekindle.memory.slots import Slots
from rekindle.memory.status import SECURED, STABLE, StatusPage
from rekindle.testing import make_shard
from tests.faults.harness import wait_for

LONG = 30.0


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


def steps_of(job: JobDir, rank: int) -> list[int]:
    return sorted(stamp.step for stamp, _ in job.snapshots.shard_ids() if stamp.rank == rank)


def be_overtaken(ckpt: rekindle.Checkpointer, guard: Guard, step: Callable[[], Any], fault: Callable[[], Any]) -> None:
    """Strike after step 3, of which rank 1 has no copy: it has secured step 4 alone."""
    with peer(ckpt, guard, 4, has=[4]):
        gasping = fault()
        wait_for(lambda: guard._gate._page.secured == 3, what="step 3 to be secured")
        trainer = threading.Thread(target=step, daemon=True)
        trainer.start()
        gasping.join(LONG)
        trainer.join(LONG)
        assert steps_of(ckpt._session.job_dir, 0) == [3, 4]
