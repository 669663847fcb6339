"""A memory store that can't be used, storage that refuses, copies that are damaged."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

import rekindle
from rekindle.cli.main import main
from rekindle.format.receipt import Receipt
from rekindle.memory.job_dir import JobDir, memory_base
from tests.faults.harness import Run, build, digest_of, finish, leftovers, restored, start, traced, train, wait_for

Mount = Callable[..., Path]


def assert_trains_without_memory(run: Run, unbroken: Callable[[Run], list[str]], why: str) -> None:
    """All steps are trained, the last ones are on storage, and one message said so before the first step."""
    assert train(run) == [0], run.log(0).read_text()
    log = run.log(0).read_text()
    assert log.count("go straight to storage") == 1
    assert why in log
    assert log.index("go straight to storage") < log.index("nothing to restore")
    assert [digest_of(run)] == unbroken(run)
    assert sorted(p.name for p in run.root.glob("step-*")) == ["step-0000000007", "step-0000000008"]
    more = Run(run.root, run.memory, steps=9, width=run.width)
    assert train(more) == [0]
    assert restored(more)[-1] == 8


def test_memory_too_small(root: Path, mounted: Mount, unbroken: Callable[[Run], list[str]]) -> None:
    small = mounted("small", "-t", "tmpfs", "-o", "size=64k", "tmpfs")
    assert_trains_without_memory(Run(root, small, width=64), unbroken, "two snapshots of about 0.1 MB")


def test_memory_read_only(root: Path, mounted: Mount, unbroken: Callable[[Run], list[str]]) -> None:
    fixed = mounted("fixed", "-t", "tmpfs", "-o", "ro,size=64m", "tmpfs")
    assert_trains_without_memory(Run(root, fixed), unbroken, "Read-only file system")


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a directory away")
def test_memory_of_another_user(root: Path, memory: Path, unbroken: Callable[[Run], list[str]]) -> None:
    theirs = memory_base(memory)
    theirs.mkdir(mode=0o700)
    os.chown(theirs, 12345, 12345)
    assert_trains_without_memory(Run(root, memory), unbroken, "belongs to user 12345")


def test_memory_limit_too_low(root: Path, memory: Path, unbroken: Callable[[Run], list[str]]) -> None:
    run = Run(root, memory, options={"memory_limit": 10_000})
    assert_trains_without_memory(run, unbroken, "memory_limit is 0.0 MB")


def test_memory_in_trouble_is_an_error_when_strict(root: Path, memory: Path) -> None:
    state = build(16)
    with pytest.raises(rekindle.MemoryStoreError, match="two snapshots of about"):
        rekindle.Checkpointer(root, state, memory=memory, memory_limit=10_000, strict=True)


def test_memory_that_fills_up_while_training(root: Path, mounted: Mount) -> None:
    small = mounted("small", "-t", "tmpfs", "-o", "size=8m", "tmpfs")
    import torch

    state = {"values": rekindle.Values(weights=torch.zeros(1000))}
    ckpt = rekindle.Checkpointer(root, state, memory=small)
    assert ckpt.restore() == 0
    ckpt.step(1)
    (small / "somebody-else").write_bytes(b"x" * (7 << 20))
    state["values"].weights = torch.full((1 << 20,), 3.0)  # now two snapshots need 8 MB
    ckpt.step(2)
    ckpt.close()
    assert ckpt.metrics.failed == 0
    again = {"values": rekindle.Values()}
    ckpt = rekindle.Checkpointer(root, again, memory=small)
    assert ckpt.restore() == 2
    assert torch.equal(again["values"].weights, state["values"].weights)
    ckpt.close()


def test_full_storage_is_retried_until_there_is_room(
    mounted: Mount, memory: Path, unbroken: Callable[[Run], list[str]]
) -> None:
    disk = mounted("disk", "-t", "tmpfs", "-o", "size=2m", "tmpfs")
    (disk / "ballast").write_bytes(b"x" * ((2 << 20) - 8192))
    root = disk / "run"
    run = Run(root, memory, steps=40, pause=0.05, width=64)
    job = JobDir.of(root, memory_base(memory))
    processes = start(run)
    wait_for(lambda: job.paths.agent_status.exists() and json.loads(job.paths.agent_status.read_text())["error"])
    assert "No space left" in json.loads(job.paths.agent_status.read_text())["error"]
    (disk / "ballast").unlink()
    assert finish(processes) == [0], run.log(0).read_text()
    assert (root / "step-0000000040" / "checkpoint.json").exists()
    wait_for(lambda: not job.path.exists())
    assert leftovers(root) == []


def flip(path: Path, offset: int) -> None:
    with open(path, "r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1]))


def weight_offset(receipt: Path) -> int:
    found = Receipt.decode(receipt.read_bytes(), receipt)
    chunk = next(c for c in found.layout.chunks if c.name == "model.0.weight")
    return found.header_bytes + chunk.start + 5


def crash_after(run: Run, step: int, durable: bool, job: JobDir) -> None:
    """Leave a job whose trainer was killed after ``step``, in memory and, if ``durable``, on storage; no agent."""
    dying = Run(run.root, run.memory, run.steps, points={0: f"save.committed@{step}"}, pause=0.1, options=run.options)
    assert train(dying) == [-9]
    if durable:
        wait_for(lambda: (run.root / f"step-{step:010d}").exists(), what="the step to become durable")
    agent = job.agent()
    if agent:
        os.kill(agent, 9)
        wait_for(lambda: job.agent() is None)


def test_a_flipped_byte_in_memory_is_never_loaded(
    root: Path, memory: Path, job: JobDir, unbroken: Callable[[Run], list[str]]
) -> None:
    run = Run(root, memory)
    crash_after(run, 5, durable=True, job=job)
    shard = job.path / "step-0000000005" / "shard-00000-of-00001.safetensors"
    flip(shard, weight_offset(shard.with_suffix(".json")))
    result = CliRunner().invoke(main, ["verify", str(root), "5", "--memory", str(memory)])
    assert result.exit_code == 4
    assert f"{shard}: tensor 'model.0.weight' of step 5 differs from its checksum" in result.output
    assert train(run) == [0]
    assert restored(run)[-1] == 5
    log = run.log(0).read_text()
    assert "restored step 5 from storage" in log
    assert "model.0.weight" in log
    assert [digest_of(run)] == unbroken(run)


def test_a_flipped_byte_in_the_only_copy_sends_the_job_back_to_an_older_step(
    root: Path, memory: Path, job: JobDir, unbroken: Callable[[Run], list[str]]
) -> None:
    run = Run(root, memory, options={"persist_every": 1000})
    crash_after(run, 5, durable=False, job=job)
    shutil.rmtree(root, ignore_errors=True)
    shard = job.path / "step-0000000005" / "shard-00000-of-00001.safetensors"
    flip(shard, weight_offset(shard.with_suffix(".json")))
    assert train(run) == [0]
    assert restored(run)[-1] == 4
    assert [digest_of(run)] == unbroken(run)
    result = CliRunner().invoke(main, ["verify", str(root), "--memory", str(memory)])
    assert result.exit_code == 0, result.output


def test_a_flipped_byte_on_storage_is_never_loaded(
    root: Path, memory: Path, job: JobDir, unbroken: Callable[[Run], list[str]]
) -> None:
    assert train(Run(root, memory, steps=5, wait="durable")) == [0]
    wait_for(lambda: not job.path.exists())
    shard = root / "step-0000000005" / "shard-00000-of-00001.safetensors"
    flip(shard, weight_offset(shard.with_suffix(".json")))
    result = CliRunner().invoke(main, ["verify", str(root), "--json", "--memory", str(memory)])
    assert result.exit_code == 4
    assert "model.0.weight" in result.output
    run = Run(root, memory)
    assert train(run) == [0]
    assert restored(run)[-1] == 4
    assert [digest_of(run)] == unbroken(run)


def test_when_no_checkpoint_is_sound_the_job_does_not_silently_start_anew(
    root: Path, memory: Path, job: JobDir
) -> None:
    assert train(Run(root, memory, steps=3)) == [0]
    wait_for(lambda: not job.path.exists())
    for shard in root.glob("step-*/*.safetensors"):
        flip(shard, weight_offset(shard.with_suffix(".json")))
    run = Run(root, memory, steps=3)
    assert train(run) == [1]
    assert "CorruptError: no checkpoint is sound" in run.log(0).read_text()
    assert len(list(root.glob("step-*"))) >= 1
    anew = Run(root, memory, steps=3, restore_step=0)
    assert train(anew) == [0]
    assert restored(anew)[-1] == 0


def test_a_damaged_snapshot_is_not_drained(root: Path, memory: Path, job: JobDir) -> None:
    run = Run(root, memory, options={"persist_every": 1000})
    crash_after(run, 5, durable=False, job=job)
    shutil.rmtree(root, ignore_errors=True)
    shard = job.path / "step-0000000005" / "shard-00000-of-00001.safetensors"
    flip(shard, weight_offset(shard.with_suffix(".json")))
    result = CliRunner().invoke(main, ["stop", str(root), "--memory", str(memory)])
    assert result.exit_code == 0, result.output
    assert [p.name for p in root.glob("step-*")] == ["step-0000000004"], "the sound one before it"


def test_the_trainer_counts_what_it_lost(root: Path, memory: Path) -> None:
    state = build(16)
    ckpt = rekindle.Checkpointer(
        root, {**state, "values": (values := rekindle.Values(a=1))}, memory=memory, persist_seconds=0
    )
    ckpt.restore()
    ckpt.step(1)
    values.bad = object()
    ckpt.step(2)  # warns, and training goes on
    assert ckpt.metrics.failed == 1
    del values.__dict__["bad"]
    ckpt.step(3)
    ckpt.close()
    assert ckpt.latest() is not None and ckpt.latest().step == 3  # type: ignore[union-attr]


def test_what_memory_holds_is_restored_even_when_there_is_no_room_for_more(
    root: Path, mounted: Mount, unbroken: Callable[[Run], list[str]]
) -> None:
    small = mounted("small", "-t", "tmpfs", "-o", "size=8m", "tmpfs")
    options = {"persist_every": 1000}
    job = JobDir.of(root, memory_base(small))
    crash_after(Run(root, small, options=options, executable="/bin/false"), 5, durable=False, job=job)
    lowered = Run(root, small, options={"memory_limit": 1000})
    assert train(lowered) == [0], lowered.log(0).read_text()
    assert restored(lowered)[-1] == 5
    assert "go straight to storage" in lowered.log(0).read_text()
    assert [digest_of(lowered)] == unbroken(lowered)
    wait_for(lambda: not job.path.exists(), what="the memory to be given back")


def test_a_memory_store_that_is_removed_under_a_live_job_costs_no_step(
    root: Path, memory: Path, job: JobDir, unbroken: Callable[[Run], list[str]]
) -> None:
    run = Run(root, memory, steps=60, pause=0.05)
    processes = start(run)
    wait_for(lambda: list(root.glob("step-*/checkpoint.json")), what="a durable step")
    while job.path.exists():  # the job goes on putting files there meanwhile
        shutil.rmtree(job.path, ignore_errors=True)
    assert finish(processes) == [0], run.log(0).read_text()
    log = run.log(0).read_text()
    assert "goes straight to storage" in log and ("was removed" in log or "nobody removes it" in log), log
    assert ("metrics", '{"failed":0}') in traced(run)
    assert [digest_of(run)] == unbroken(run)
    assert (root / "step-0000000060").exists()


def test_an_interrupt_in_the_middle_of_a_save_spoils_no_later_one(root: Path, memory: Path) -> None:
    import random
    import signal
    import time

    import torch

    class Interrupt(BaseException):
        pass

    def interrupt(*_: object) -> None:
        raise Interrupt

    weights = torch.zeros(1 << 20)
    ckpt = rekindle.Checkpointer(root, {"values": rekindle.Values(weights=weights)}, memory=memory, persist_seconds=0)
    ckpt.restore()
    before = signal.signal(signal.SIGALRM, interrupt)
    chance, step, interrupted = random.Random(0), 0, 0
    deadline = time.monotonic() + 20
    try:
        while interrupted < 40 and time.monotonic() < deadline:
            step += 1
            weights.fill_(step)
            try:
                signal.setitimer(signal.ITIMER_REAL, chance.uniform(0.00002, 0.003))
                ckpt.step(step)
                signal.setitimer(signal.ITIMER_REAL, 0)
            except Interrupt:
                interrupted += 1
                step += 1
                weights.fill_(step)
                ckpt.step(step)
                assert ckpt.metrics.failed == 0
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert interrupted >= 10
    step += 1
    weights.fill_(step)
    ckpt.save(step, wait="durable", timeout=30)
    ckpt.close()
    back = rekindle.Values()
    ckpt = rekindle.Checkpointer(root, {"values": back}, memory=memory)
    assert ckpt.restore() == step
    assert torch.equal(back.weights, weights)
    ckpt.close()
