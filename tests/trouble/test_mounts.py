"""A mount that goes at the worst moment: what is then written below its place is not durable, and nobody says so."""

from __future__ import annotations

import gc
import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack, nullcontext, suppress
from pathlib import Path
from typing import Any

import pytest
import torch

import rekindle
from rekindle.agent.drain import Drainer
from rekindle.format.lineage import Incarnation, ShardId
from rekindle.memory.job import JobInfo
from rekindle.memory.job_dir import JobDir, memory_base
from rekindle.memory.slots import Slots
from rekindle.storage.posix import PosixStore
from rekindle.testing import make_shard
from rekindle.transfer.importing import import_checkpoint
from rekindle.transfer.progress import Progress
from tests.conftest import Disk, commit, have_own_mounts
from tests.faults.harness import wait_for
from tests.integrations.dcp.ranks import attempt, ranks

START = Incarnation(1, "a" * 16)


@pytest.fixture
def put(disk: Disk, memory: Path) -> Iterator[Callable[[int], JobDir]]:
    """Puts a snapshot into the memory of a job that saves to the disk."""
    with ExitStack() as stack:

        def save(step: int) -> JobDir:
            job = JobDir.of(disk.root, memory_base())
            job.create()
            job.write_job(JobInfo(str(disk.root), [0], 1, 1, None, 600.0, None))
            receipt, data = make_shard(ShardId(step, 0, 1, START), {"x": b"%d" % step})
            slots = Slots(job, 0, 1, [0])
            stack.callback(slots.close)
            commit(slots, receipt, data)
            return job

        yield save


def before(name: str, monkeypatch: pytest.MonkeyPatch, first: Callable[[], None]) -> None:
    """Once, before a store's next call of that name, do something else."""
    call = getattr(PosixStore, name)

    def work(self: PosixStore, *args: Any, **more: Any) -> Any:
        monkeypatch.setattr(PosixStore, name, call)
        first()
        return call(self, *args, **more)

    monkeypatch.setattr(PosixStore, name, work)


@pytest.mark.parametrize("moment", ["has_shard", "write_shard", "publish"])
def test_an_agent_looks_again_before_it_says_durable(
    moment: str, disk: Disk, put: Callable[[int], JobDir], monkeypatch: pytest.MonkeyPatch
) -> None:
    drainer = Drainer(put(1))
    assert drainer.tick() and disk.really() == [1]
    put(2)
    before(moment, monkeypatch, disk.unmount)
    assert not drainer.tick() and drainer.job.notes.durable() == 1
    assert "there, and nothing is now" in str(drainer.progress.error) or "is gone" in str(drainer.progress.error)
    drainer._retry_at = 0.0
    assert not drainer.tick() and "step 1 was there, and nothing is now" in str(drainer.progress.error)
    disk.mount()
    drainer._retry_at = 0.0
    assert drainer.tick() and disk.really() == [2] and drainer.job.notes.durable() == 2


def test_what_is_gone_when_the_mount_is_back_is_drained_again(
    disk: Disk, put: Callable[[int], JobDir], monkeypatch: pytest.MonkeyPatch
) -> None:
    drainer = Drainer(put(1))
    assert drainer.tick()
    put(2)

    def elsewhere() -> None:
        disk.unmount()
        before("published", monkeypatch, disk.mount)

    before("write_shard", monkeypatch, elsewhere)
    assert not drainer.tick() and disk.really() == [1]
    drainer._retry_at = 0.0
    assert drainer.tick() and disk.really() == [2]


def test_a_checkpoint_that_goes_from_storage_is_drained_again(
    disk: Disk, put: Callable[[int], JobDir], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where somebody puts an older copy of the root in its place."""
    monkeypatch.setattr("rekindle.agent.backlog._RECHECK", 0.0)
    drainer = Drainer(put(1))
    assert drainer.tick()
    older = shutil.copytree(disk.root, disk.place / "older")
    put(2)
    assert drainer.tick() and not drainer.tick() and disk.really() == [2]
    shutil.rmtree(disk.root)
    older.rename(disk.root)
    assert drainer.pending() == 2 and drainer.tick() and disk.really() == [2]


def test_an_import_is_not_written_below_a_mount_that_is_gone(
    disk: Disk, put: Callable[[int], JobDir], tmp_path: Path
) -> None:
    assert Drainer(put(1)).tick()
    source = tmp_path / "source.pt"
    torch.save({"x": torch.zeros(10)}, source)

    def take_in() -> None:
        job = JobDir.of(disk.root, memory_base())
        import_checkpoint(source, job, disk.root, 2, None, Progress(), allow_pickle=False)

    disk.unmount()
    with pytest.raises(FileNotFoundError, match="step 1 was there, and nothing is now"):
        take_in()
    assert not disk.root.exists()
    disk.mount()
    take_in()
    assert disk.really() == [1, 2]


@pytest.mark.parametrize("moment", ["write_shard", "publish"])
def test_a_save_straight_to_storage_looks_again_too(
    moment: str, disk: Disk, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = rekindle.Values(weights=torch.zeros(1000))
    ckpt = rekindle.Checkpointer(disk.root, {"values": values}, memory=memory, memory_limit=1)
    ckpt.save(1, wait="durable", timeout=20)
    before(moment, monkeypatch, disk.unmount)
    for step in (2, 3):
        with pytest.raises(rekindle.NotDurableError, match=r"nothing is now|not on storage|is gone"):
            ckpt.save(step, wait="durable", timeout=30)  # it fails at once, unless the machine is busy
        assert disk.really() == [1]
    disk.mount()
    ckpt.save(4, wait="durable", timeout=20)
    assert disk.really() == [1, 4]
    ckpt.close(timeout=20)


def test_a_start_that_never_asks_what_there_was_is_refused_where_there_was_something(disk: Disk, memory: Path) -> None:
    """As it is where storage shows what there was. Memory is too small for more than a note of it."""
    values = rekindle.Values(weights=torch.zeros(1000))
    ckpt = rekindle.Checkpointer(disk.root, {"values": values}, memory=memory, memory_limit=1)
    ckpt.save(1, wait="durable", timeout=20)
    del ckpt
    gc.collect()
    disk.unmount()
    ckpt = rekindle.Checkpointer(disk.root, {"values": values}, memory=memory, memory_limit=1)
    with pytest.raises(rekindle.UsageError, match=r"call restore\(\) before the first step"):
        ckpt.step(1)
    ckpt.close()
    disk.mount()


def _save_on_a_node_of_its_own(rank: int, disk: Disk, memory: Path) -> list[str]:
    """Each rank has a memory, and mounts, of its own; that of rank 1 goes after step 1."""
    have_own_mounts()
    values = rekindle.Values(weights=torch.zeros(1000))
    found: list[str] = []
    own = memory / f"node-{rank}"
    own.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(own)], check=True)
    ckpt = rekindle.Checkpointer(disk.root, {"values": values}, memory=own, memory_limit=1, persist_every=1)
    ckpt.restore()
    for step in (1, 2, 3):
        if (rank, step) == (0, 1):  # so that the other one never publishes
            wait_for(lambda: list(disk.source.glob("run/*.partial/shard-00001-of-00002.json")))
        try:
            ckpt.save(step, wait="memory", timeout=20)
        except rekindle.NotDurableError as error:
            found.append(f"{step}: {error}")
        torch.distributed.barrier()
        if rank == 1 and step == 1:
            disk.unmount()
    return found


def test_a_node_whose_mount_is_gone_says_so_though_others_publish(disk: Disk, memory: Path) -> None:
    fine, gone = ranks(2, _save_on_a_node_of_its_own, disk, memory)
    assert disk.really() == [1] and fine == []
    assert [line[:2] for line in gone] == ["2:", "3:"] and "step 1 was there, and nothing is now" in gone[0]


def _train_to(rank: int, disk: Disk, memory: Path, step: int, blind: bool = False) -> int | str:
    if blind and rank == 1:
        have_own_mounts()
        disk.unmount()
    values = rekindle.Values(weights=torch.zeros(1000))
    ckpt = rekindle.Checkpointer(disk.root, {"values": values}, memory=memory)
    try:
        began = ckpt.restore()
    except rekindle.NotFoundError as error:
        return str(error)
    ckpt.save(step, wait="durable", timeout=30)
    ckpt.close(timeout=30)
    return began


def test_what_one_rank_sees_on_storage_is_not_left_behind_because_another_one_does_not(
    disk: Disk, memory: Path
) -> None:
    old, new = memory / "old", memory / "new"
    assert ranks(2, _train_to, disk, old, 1) == [0, 0]
    assert ranks(2, _train_to, disk, new, 2) == [1, 1], "on another node"
    for error in ranks(2, _train_to, disk, old, 3, True):
        assert (
            f"step 2 was on storage, and {disk.root} shows nothing of it now on rank 1: see that it is mounted"
            in str(error)
        )
    assert disk.really() == [1, 2]
    assert ranks(2, _train_to, disk, old, 3) == [2, 2]


def _kill_at_two(rank: int, disk: Disk, memory: Path) -> None:
    values = rekindle.Values(weights=torch.zeros(1000))
    ckpt = rekindle.Checkpointer(disk.root, {"values": values}, memory=memory)
    ckpt.restore()
    ckpt.save(2, wait="durable", timeout=30)
    torch.distributed.barrier()
    os.kill(os.getpid(), signal.SIGKILL)


def _goes_on_from(rank: int, disk: Disk, memory: Path, blind: bool) -> int:
    if blind and rank == 1:
        have_own_mounts()
        disk.unmount()
    values = rekindle.Values(weights=torch.zeros(1000))
    ckpt = rekindle.Checkpointer(disk.root, {"values": values}, memory=memory)
    began = ckpt.restore()
    with suppress(rekindle.NotDurableError) if blind else nullcontext():  # memory alone has what was restored
        ckpt.close(1.0 if blind else 60.0)
    return began


def test_a_root_was_deleted_only_if_no_rank_says_that_it_is_not_mounted(disk: Disk, memory: Path) -> None:
    attempt(2, _kill_at_two, disk, memory)
    assert disk.really() == [2]
    shutil.rmtree(disk.root)
    assert ranks(2, _goes_on_from, disk, memory, True) == [2, 2], "from memory"
    assert ranks(2, _goes_on_from, disk, memory, False) == [0, 0]


def test_a_start_made_while_storage_is_away_comes_after_what_it_finds_there_later(disk: Disk, memory: Path) -> None:
    values = rekindle.Values(weights=torch.zeros(1000))
    for step in (1, 2):
        ckpt = rekindle.Checkpointer(disk.root, {"values": values}, memory=memory)
        assert ckpt.restore() == step - 1
        ckpt.save(step, wait="durable", timeout=20)
        ckpt.close(timeout=20)
    disk.unmount()
    ckpt = rekindle.Checkpointer(disk.root, {"values": values}, memory=memory)
    disk.mount()
    assert ckpt.restore() == 2
    ckpt.save(3, wait="durable", timeout=20)
    ckpt.close(timeout=20)
    assert disk.really()[-1] == 3


def test_a_start_that_goes_on_from_memory_knows_what_storage_has(disk: Disk, memory: Path) -> None:
    values = rekindle.Values(weights=torch.zeros(1000))
    job = JobDir.of(disk.root, memory_base())
    for steps in ((1, 2), (3, 4), (5,)):
        ckpt = rekindle.Checkpointer(disk.root, {"values": values}, memory=memory, persist_every=2)
        assert ckpt.restore() == steps[0] - 1
        for step in steps:
            ckpt.step(step) if step % 2 else ckpt.save(step, wait="durable", timeout=20)
        stored = steps[-1] // 2 * 2
        wait_for(lambda: job.notes.durable() == stored)  # noqa: B023 - waited for here
        ckpt._saver.secure(20)
        agent = job.agent()
        if agent is not None:
            os.kill(agent, signal.SIGKILL)
        del ckpt
        gc.collect()
    disk.unmount()
    ckpt = rekindle.Checkpointer(disk.root, {"values": values}, memory=memory, persist_every=2)
    assert ckpt.restore() == 5
    assert job.notes.durable() in (4, 5), "noted still; 5, if an agent came in between"
    disk.mount()
    ckpt.save(6, wait="durable", timeout=20)
    ckpt.close(timeout=20)
    assert disk.really()[-1] == 6
