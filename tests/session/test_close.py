"""close() and what it waits for: it ends when nobody will carry that to storage, and says why."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import rekindle
from rekindle.memory.incident import ENDED, RUNNING
from rekindle.memory.incidents import describe_stretch, write_incident
from rekindle.memory.job_dir import JobDir, memory_base
from rekindle.storage.incidents import load_incidents
from rekindle.storage.posix import PosixStore
from tests.faults.harness import wait_for
from tests.fork_server import context, run_and_kill
from tests.test_checkpointer import Training, go

LONG = 300.0
"""Seconds that no test waits for."""


def start(root: Path, training: Training) -> rekindle.Checkpointer:
    """A run whose policy sends nothing to storage."""
    ckpt = rekindle.Checkpointer(root, training.state, persist_every=1000, overlap=True)
    ckpt.restore()
    return ckpt


def changed_too_late(ckpt: rekindle.Checkpointer, training: Training, step: int) -> None:
    """A save that fails while training goes on, whichever thread is faster."""
    assert ckpt._saver.memory is not None
    land, begun = ckpt._saver.live.writer.behind, []
    ckpt._saver.live.writer.behind = begun.append  # type: ignore[assignment,method-assign]
    training.update()
    ckpt.step(step)
    torch.nn.init.constant_(training.model.weight, 7.0)
    ckpt._saver.live.writer.behind = land  # type: ignore[method-assign]
    assert len(begun) == 1
    begun[0]()


def durable(root: Path) -> list[int]:
    return [int(path.name[5:]) for path in sorted(root.glob("step-*"))]


def closed_within(ckpt: rekindle.Checkpointer, seconds: float = 60.0) -> None:
    began = time.monotonic()
    try:
        ckpt.close(LONG)
    finally:
        assert time.monotonic() - began < seconds


def test_after_a_last_save_that_failed_the_one_before_is_made_durable(root: Path, memory: Path) -> None:
    training = Training()
    ckpt = start(root, training)
    go(ckpt, training, 1, 2)
    changed_too_late(ckpt, training, 3)
    closed_within(ckpt)
    assert ckpt.metrics.failed == 1 and durable(root) == [2]


def test_after_a_last_save_that_was_interrupted_too(root: Path, memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    training = Training()
    ckpt = start(root, training)
    go(ckpt, training, 1, 2)
    assert ckpt._saver.memory is not None

    def interrupted(*args: object, **kwargs: object) -> None:
        raise KeyboardInterrupt

    training.update()
    with monkeypatch.context() as patch:
        patch.setattr(ckpt._saver.memory.slots, "acquire", interrupted)
        with pytest.raises(KeyboardInterrupt):
            ckpt.step(3)
    closed_within(ckpt)
    assert durable(root) == [2]


def test_what_memory_has_lost_is_not_waited_for(root: Path, memory: Path) -> None:
    training = Training()
    ckpt = start(root, training)
    go(ckpt, training, 1, 2)
    ckpt._saver.conclude()
    JobDir.of(root, memory_base(memory)).snapshots.remove(0)
    with pytest.raises(rekindle.NotDurableError, match="nobody carries it there: rank 0 has no part"):
        closed_within(ckpt)


def test_a_snapshot_that_is_sent_later_is_not_given_up_for_newer_ones(root: Path, memory: Path) -> None:
    """Its writer has to know, too, that the agent is to carry it."""
    training = Training()
    ckpt = start(root, training)
    root.write_text("a file where the directory should be: nothing is drained")
    go(ckpt, training, 1, 1)
    ckpt.save(1)
    go(ckpt, training, 2, 5)
    ckpt._saver.conclude()
    steps = {stamp.step for stamp, _ in JobDir.of(root, memory_base(memory)).snapshots.shard_ids()}
    root.unlink()
    assert steps >= {1, 5}
    closed_within(ckpt)
    assert durable(root)[-1] == 5


def test_records_of_incidents_get_to_storage_though_no_agent_lives_when_memory_is_given_back(
    root: Path, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = Training()
    ckpt = start(root, training)
    go(ckpt, training, 1, 2)
    ckpt.save(2, wait="durable", timeout=60.0)
    job = JobDir.of(root, memory_base(memory))
    agent = job.agent()
    assert agent
    monkeypatch.setattr(sys, "executable", "/bin/false")
    os.kill(agent, signal.SIGKILL)
    wait_for(lambda: job.agent() is None)
    stretch = describe_stretch(job, RUNNING)
    assert stretch is not None
    write_incident(job, replace(stretch, generation=0, start="a" * 16, cause="signal", what="rank 0 was killed"))
    closed_within(ckpt)
    records, problems = load_incidents(PosixStore(root))
    assert [one.cause for one in records] == ["signal", ENDED] and not problems and not job.path.exists()


def test_a_second_close_waits_for_what_the_first_one_did(
    root: Path, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = Training()
    ckpt = start(root, training)
    go(ckpt, training, 1, 2)
    with monkeypatch.context() as patch:
        patch.setattr(PosixStore, "durable", lambda *args: False)
        for _ in range(2):
            with pytest.raises(rekindle.NotDurableError, match="step 2"):
                ckpt.close(timeout=0.1)
    closed_within(ckpt)
    assert durable(root) == [2]
    monkeypatch.setattr(PosixStore, "durable", None)  # nobody asks it any more
    ckpt.close()


def test_a_second_close_waits_after_an_interrupted_one(
    root: Path, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = Training()
    ckpt = start(root, training)
    go(ckpt, training, 1, 2)

    def interrupted(*args: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(ckpt._saver, "wait_durable", interrupted)
        with pytest.raises(KeyboardInterrupt):
            ckpt.close()
    closed_within(ckpt)
    assert durable(root) == [2]


def _save_to_memory(root: Path, memory: Path) -> None:
    training = Training()
    ckpt = rekindle.Checkpointer(root, training.state, memory=memory, persist_every=1000)
    ckpt.restore()
    root.write_text("in the way")
    go(ckpt, training, 1, 2)
    ckpt._saver.conclude()


def test_a_run_that_has_saved_nothing_waits_for_what_it_restored(root: Path, memory: Path) -> None:
    """As a job that is finished, and started again: its last step may be in memory only."""
    run_and_kill(_save_to_memory, root, memory)
    ckpt = rekindle.Checkpointer(root, Training().state, persist_every=1000)
    assert ckpt.restore() == 2
    with pytest.raises(rekindle.NotDurableError, match="step 2 is not on storage"):
        ckpt.close(timeout=0.1)
    root.unlink()
    closed_within(ckpt)
    assert durable(root) == [2]


def test_when_it_returns_nobody_works_on_storage_or_memory_any_more(root: Path, memory: Path) -> None:
    job = JobDir.of(root, memory_base(memory))
    for _ in range(3):
        training = Training()
        ckpt = rekindle.Checkpointer(root, training.state, persist_every=1, keep=1)
        assert ckpt.restore() == 0
        go(ckpt, training, 1, 3)
        ckpt.close()
        assert not job.path.exists() and [path.name for path in root.glob("step-*")] == ["step-0000000003"]
        shutil.rmtree(root)


def _rank(root: Path, memory: Path, rank: int, persist_every: int | None) -> None:
    how = {"init_method": f"file://{root.parent / 'rendezvous'}", "rank": rank, "world_size": 2}
    torch.distributed.init_process_group("gloo", **how)  # type: ignore[arg-type]
    training = Training()
    ckpt = rekindle.Checkpointer(root, training.state, memory=memory, persist_every=persist_every, overlap=True)
    ckpt.restore()
    go(ckpt, training, 1, 1)
    ckpt._saver.conclude()
    torch.distributed.barrier()
    if rank == 1:
        changed_too_late(ckpt, training, 2)
    else:
        go(ckpt, training, 2, 2)
    began = time.monotonic()
    try:
        ckpt.close(LONG)
        how_it_went = "durable"
    except rekindle.NotDurableError as error:
        how_it_went = str(error)
    draft = root.parent / f"draft-{rank}"
    draft.write_text(how_it_went if time.monotonic() - began < LONG / 2 else "too late")
    os.replace(draft, root.parent / f"ended-{rank}")  # whole, for who looks if it is there
    os._exit(0)


@pytest.mark.parametrize("persist_every", [None, 1000])
def test_a_rank_does_not_wait_for_a_part_that_another_one_failed_to_save(
    persist_every: int | None, root: Path, memory: Path
) -> None:
    ranks = [context.Process(target=_rank, args=(root, memory, r, persist_every)) for r in range(2)]
    for process in ranks:
        process.start()
    try:
        wait_for(lambda: all((root.parent / f"ended-{r}").exists() for r in range(2)), 120, "both ranks to close")
    finally:
        for process in ranks:
            process.kill()
            process.join()
    found = [(root.parent / f"ended-{r}").read_text() for r in range(2)]
    assert "step 2 is not on storage, and nobody carries it there: rank 1 has no part" in found[0]
    assert found[1] == "durable"
    assert durable(root) == [1]


def _save_to_storage(root: Path, memory: Path, steps: int) -> None:
    training = Training()
    ckpt = rekindle.Checkpointer(root, training.state, memory=memory, persist_every=1000)
    ckpt.restore()
    go(ckpt, training, 1, steps - 1)
    ckpt.save(steps - 1, wait="durable")
    go(ckpt, training, steps, steps)
    ckpt.save(steps, wait="durable")


def test_what_was_restored_and_is_durable_stays_in_memory_no_longer(root: Path, memory: Path) -> None:
    run_and_kill(_save_to_storage, root, memory, 5)
    job = JobDir.of(root, memory_base(memory))
    ckpt = rekindle.Checkpointer(root, Training().state, persist_every=1000)
    assert ckpt.restore(step=4) == 4
    closed_within(ckpt)
    assert max(stamp.step for stamp, _ in job.snapshots.shard_ids()) == 5, (
        "what was not gone on from is left to the next start"
    )
    ckpt = rekindle.Checkpointer(root, Training().state, persist_every=1000)
    assert ckpt.restore() == 5 and ckpt.metrics.restored_from == "memory"
    closed_within(ckpt)
    assert not job.path.exists() and durable(root) == [4, 5]


def test_what_storage_has_is_saved_though_it_refuses_to_tidy(
    root: Path, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a save straight to storage, as there is no memory store."""

    def refuse(*_: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(root))

    monkeypatch.setattr(PosixStore, "clean_up", refuse)
    training = Training()
    ckpt = rekindle.Checkpointer(root, training.state, persist_every=1, memory="/proc", strict=False)
    ckpt.restore()
    go(ckpt, training, 1, 2)
    training.update()
    ckpt.save(3, wait="durable", timeout=60)
    ckpt.close(60)
    assert ckpt.metrics.failed == 0
    assert {entry.stamp.step: entry.pinned for entry in PosixStore(root).published()}[3]


def test_an_agent_that_only_tells_of_faults_is_not_waited_for(root: Path, memory: Path) -> None:
    """guard() starts one where memory has no room: it knows no storage, and stays for a minute."""
    training = Training()
    ckpt = rekindle.Checkpointer(root, training.state, memory_limit=1)
    ckpt.restore()
    with ckpt.guard(watchdog=False) as guard:
        assert guard.connected(60)
        go(ckpt, training, 1, 2)
    job = JobDir.of(root, memory_base(memory))
    assert ckpt._saver.memory is None and not job.paths.job.exists() and job.agent() is not None
    closed_within(ckpt, 20.0)
    assert durable(root)[-1] == 2


def test_inside_of_guard_the_agent_ends_though_this_process_is_connected_to_it(root: Path, memory: Path) -> None:
    training = Training()
    ckpt = start(root, training)
    with ckpt.guard(watchdog=False) as guard:
        assert guard.connected(60)
        go(ckpt, training, 1, 2)
        closed_within(ckpt, 20.0)
    assert durable(root) == [2] and not JobDir.of(root, memory_base(memory)).path.exists()
