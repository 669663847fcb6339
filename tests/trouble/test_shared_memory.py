"""/dev/shm is shared with a DataLoader's workers: snapshots leave them room, or go straight to storage."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from rekindle.errors import MemoryStoreError
from rekindle.format.lineage import Incarnation, ShardId
from rekindle.memory.job_dir import JobDir
from rekindle.memory.room import Room
from rekindle.memory.slots import Slots
from rekindle.testing.shards import make_shard

MIB = 1 << 20

TRAIN = """
import logging, subprocess, sys, torch, rekindle
logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
torch.set_num_threads(1)

class Batches(torch.utils.data.Dataset):
    def __len__(self):
        return 3
    def __getitem__(self, index):
        return torch.ones(4 << 20)  # 16 MiB; a worker hands over three of them in /dev/shm

for size, headroom in (("64m", None), ("256m", None), ("256m", 230 << 20)):
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", "/dev/shm"], check=True)
    model = torch.nn.Linear(1500, 1500)  # 18 MB with its momentum: two snapshots fit into 64 MB
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    state = {"model": model, "optimizer": optimizer}
    root = f"{sys.argv[1]}/{size}-{headroom}"
    ckpt = rekindle.Checkpointer(root, state, snapshot_every=1, persist_seconds=0, memory_headroom=headroom)
    assert ckpt._saver.memory is None or ckpt._saver.memory.slots.wait_made(60)
    for step, batch in enumerate(torch.utils.data.DataLoader(Batches(), batch_size=None, num_workers=1), 1):
        optimizer.zero_grad()
        model(batch[:1500]).sum().backward()
        optimizer.step()
        ckpt.step(step)
    ckpt.close()
    print("trained", size, headroom, ckpt.metrics.saves, ckpt.metrics.direct, flush=True)
"""


@pytest.mark.campaign(seconds=9)
def test_workers_of_a_data_loader_find_room_beside_snapshots(tmp_path: Path) -> None:
    """In /dev/shm itself, of 64 MB, as Docker makes it, and larger: mounted where only this process sees it."""
    private = ["unshare", "--mount", "--propagation", "private"]
    if shutil.which("unshare") is None or subprocess.run([*private, "true"], check=False).returncode:
        pytest.skip("no mounts of one's own here")
    done = subprocess.run(
        [*private, sys.executable, "-c", TRAIN, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
        env={"PATH": "/usr/bin:/bin", "HOME": str(tmp_path)},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    trained = [line.split()[1:] for line in done.stdout.splitlines() if line.startswith("trained")]
    assert [trained[0], trained[2]] == [["64m", "None", "3", "3"], ["256m", str(230 * MIB), "3", "3"]]
    # The last step may be left out while room for a third snapshot is made beside a drain; close() sends it to storage.
    assert trained[1] in (["256m", "None", "3", "0"], ["256m", "None", "2", "1"])
    small, large, spared = done.stdout.split("trained")[:3]
    assert "67.1 MB are to be left to others, such as a DataLoader's workers: give it 99 MiB" in small
    assert "(a container: --shm-size), or lower memory_headroom. Checkpoints go straight to storage" in small
    assert "memory store /dev/shm/rekindle-" in large
    assert "of which 67.1 MB are reserved for other programs, except in a dying gasp" in large
    assert "memory_headroom" in spared


@pytest.fixture
def job(small_tmpfs: Callable[[int], Path]) -> JobDir:
    job = JobDir(small_tmpfs(16 * MIB) / "rekindle-0" / "job")
    job.create()
    return job


def save(slots: Slots, step: int, nbytes: int = 3 * MIB, gasp: bool = False) -> None:
    incarnation = Incarnation(1, "0" * 16)
    slot = slots.acquire(step, incarnation, nbytes, gasp=gasp)
    receipt, _ = make_shard(ShardId(step, 0, 1, incarnation), {})
    slots.commit(slot, receipt.stamp, receipt.raw)


def test_a_third_snapshot_and_a_larger_one_leave_the_headroom_and_a_gasp_may_have_it(job: JobDir) -> None:
    slots = Slots(job, 0, 1, [0], headroom=8 * MIB)
    save(slots, 1)
    save(slots, 2)
    with pytest.raises(MemoryStoreError, match=r"8,388,608 bytes to others: .*memory_headroom"):
        save(slots, 3, nbytes=6 * MIB)
    assert job.free_bytes() >= 8 * MIB
    save(slots, 3, nbytes=6 * MIB, gasp=True)
    assert job.free_bytes() < 8 * MIB
    slots.close()


def test_a_job_that_comes_back_is_not_refused_the_memory_that_it_has(job: JobDir) -> None:
    slots = Slots(job, 0, 1, [0])
    save(slots, 1)
    save(slots, 2)
    (job.path.parent.parent / "a worker's batch").write_bytes(bytes(7 * MIB))
    room = Room(None, 8 * MIB)
    assert room.describe_shortage(job, 3 * MIB, 1) is None
    assert "give it 24 MiB" in str(room.describe_shortage(job, 4 * MIB, 1))
    slots.close()
    assert Room().headroom(job) == 0, "a file system of one's own"
