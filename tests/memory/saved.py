"""Saves made by hand into a rank's slots, and what is to be found of them."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

from rekindle.format.lineage import Incarnation, ShardId
from rekindle.format.names import receipt_name, step_dir
from rekindle.format.shard import OpenShard
from rekindle.memory.job_dir import JobDir
from rekindle.memory.slot import Slot
from rekindle.memory.slots import Slots
from rekindle.storage.verify import verify_shard
from tests.conftest import make_shard

FIRST = Incarnation(1, "a" * 16)
SIZE = 50_000
FILE = 4096 + SIZE


def content(step: int, rank: int = 0, size: int = SIZE) -> bytes:
    return (b"step %d rank %d. " % (step, rank) * size)[:size]


def begin(slots: Slots, step: int, incarnation: Incarnation = FIRST, size: int = SIZE) -> Slot:
    """Everything of a save but its commit."""
    receipt, data = make_shard(
        ShardId(step, slots.rank, slots.world, incarnation), {"x": content(step, slots.rank, size)}
    )
    slot = slots.acquire(step, incarnation, receipt.file_bytes)
    slot.map[: len(data)] = data  # the mapping may be longer than the file
    return slot


def end(slots: Slots, slot: Slot, step: int, incarnation: Incarnation = FIRST, size: int = SIZE, persist=True) -> None:
    stamp = ShardId(step, slots.rank, slots.world, incarnation, persist)
    slots.commit(slot, stamp, make_shard(stamp, {"x": content(step, slots.rank, size)})[0].raw)


def save(slots: Slots, step: int, incarnation: Incarnation = FIRST, size: int = SIZE, persist: bool = True) -> None:
    end(slots, begin(slots, step, incarnation, size), step, incarnation, size, persist)


def steps(job: JobDir, rank: int = 0) -> list[int]:
    return sorted(stamp.step for stamp, _ in job.snapshots.shard_ids() if stamp.rank == rank)


def files(job: JobDir, rank: int = 0) -> list[Path]:
    return job.snapshots.rank_files(rank)


def open_step(job: JobDir, step: int, rank: int = 0, world: int = 1) -> OpenShard:
    return OpenShard.open(job.path / step_dir(step) / receipt_name(rank, world), in_memory=True)


def assert_sound(job: JobDir, step: int, rank: int = 0, world: int = 1, size: int = SIZE) -> None:
    with open_step(job, step, rank, world) as shard:
        view, problems = shard.map(), verify_shard(shard)
        assert not problems and shard.receipt.stamp.step == step
        assert bytes(view[shard.receipt.header_bytes :]) == content(step, rank, size)


def alone(job: JobDir, limit: int | None = None) -> Slots:
    return Slots(job, 0, 1, [0], limit)


def successor_of(job: JobDir) -> Slots:
    """The slots of the next process, once it has taken over what it found."""
    slots = alone(job)
    slots.adopt()
    return slots


def run_until_killed(script: str, job: JobDir) -> None:
    """Runs a script in a process of its own, which is given the job's directory and kills itself."""
    here = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", script, str(job.path)], cwd=here, check=False)
    assert done.returncode == -signal.SIGKILL
