"""Memory or the agent fails under a live job, and heals: saves go elsewhere meanwhile, and come back by themselves."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

import rekindle
from rekindle.agent.process import Process
from rekindle.common.backoff import EARLY_TRIES, Backoff, delays
from rekindle.format.lineage import Incarnation, ShardId
from rekindle.format.names import MANIFEST, MANIFEST_KIND, step_dir
from rekindle.format.receipt import parse_document
from rekindle.memory.job_dir import JobDir
from rekindle.memory.status import read_status
from rekindle.storage.posix import PosixStore
from tests.conftest import Disk, make_shard
from tests.faults.harness import Run, take_away, train, wait_for
from tests.fork_server import run_and_kill
from tests.stored import newest, sound
from tests.unreadable import unreadable

Alarms = Callable[[], list[str]]


def goes_on(ckpt: rekindle.Checkpointer, weights: torch.Tensor, step: int) -> int:
    weights.fill_(step)
    ckpt.step(step)
    return step


def real_agent(job: JobDir) -> int | None:
    """An agent, which takes a moment to start; not this process that does its work meanwhile."""
    pid = job.agent()
    return None if pid == os.getpid() else pid


def over(pid: int) -> bool:
    try:
        return Process(pid).look().over
    except (ProcessLookupError, FileNotFoundError):
        return True


def until(condition: Callable[[], object], ckpt: rekindle.Checkpointer, weights: torch.Tensor, step: int) -> int:
    """Train until ``condition``. Gives the last step."""
    deadline = time.monotonic() + 100
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        step = goes_on(ckpt, weights, step + 1)
        time.sleep(0.01)
    return step


def test_three_tries_take_the_time_that_was_given_and_then_they_become_rare() -> None:
    now = [100.0]
    tries, tried = Backoff(6.0, lambda: now[0]), []
    for _ in range(2000):
        if tries.due():
            tried.append(now[0] - 100.0)
            tries.fail()
        now[0] += 0.25
    assert tried[:6] == [0.0, 1.0, 3.0, 6.0, 12.0, 24.0]
    assert tried[-1] - tried[-2] == 60.0
    tries.succeed()
    assert tries.due() and tries.failed == 0
    first = [pause for _, pause in zip(range(EARLY_TRIES), delays(10.0), strict=False)]
    assert sum(first) == 10.0 and first == sorted(first)


@pytest.mark.parametrize("how", ["removed", "unreadable"])
def test_memory_that_goes_and_comes_back(how: str, root: Path, memory: Path, job: JobDir, alarms: Alarms) -> None:
    weights = torch.zeros(1000)
    state = {"values": rekindle.Values(weights=weights)}
    ckpt = rekindle.Checkpointer(root, state, memory=memory, persist_seconds=0, fallback_after=1.5)
    ckpt.restore()
    agent = wait_for(lambda: real_agent(job))
    with ckpt.guard(watchdog=False):
        step = goes_on(ckpt, weights, 1)
        if how == "removed":
            take_away(job.path)
            memory.chmod(0o700)
            (memory / job.path.parent.name).rename(memory / "away")
            (memory / job.path.parent.name).write_text("in the way")
        else:  # a file where the directory of free files should be
            take_away(job.paths.slots)
            job.paths.slots.write_text("in the way")
        step = until(lambda: ckpt.metrics.direct >= 5 and newest(root) > 1, ckpt, weights, step)
        assert ckpt.metrics.memory_lost == 1 and ckpt.metrics.memory_back == 0
        if how == "removed":
            (memory / job.path.parent.name).unlink()
            (memory / "away").rename(memory / job.path.parent.name)
        else:
            job.paths.slots.unlink()
            job.paths.slots.mkdir(mode=0o700)
        step = until(lambda: ckpt.metrics.memory_back, ckpt, weights, step)
        direct = ckpt.metrics.direct
        step = until(lambda: real_agent(job) and newest(root) > step, ckpt, weights, step)
        if how == "removed":
            assert job.agent() != agent, "the one that had no directory any more has left"
            wait_for(lambda: over(agent))
        assert read_status(job.paths.status_page(0)).pid == os.getpid()
    ckpt.close(timeout=30)
    assert ckpt.metrics.direct == direct, "all go into memory again"
    changes = [line for line in alarms() if "straight to storage" in line or "memory takes saves again" in line]
    assert len(changes) == 2, changes
    wait_for(lambda: not job.path.exists())  # the agent has tidied up
    assert ckpt.metrics.failed == 0 and sound(root)[0] == step
    again = {"values": rekindle.Values()}
    ckpt = rekindle.Checkpointer(root, again, memory=memory)
    assert ckpt.restore() == step and torch.equal(again["values"].weights, weights)
    ckpt.close()


def test_memory_that_fills_up_and_has_room_again(
    root: Path, small_tmpfs: Callable[[int], Path], alarms: Alarms
) -> None:
    small = small_tmpfs(8 << 20)
    weights = torch.zeros(1000)
    state = {"values": rekindle.Values(weights=weights)}
    ckpt = rekindle.Checkpointer(root, state, memory=small, persist_seconds=0, fallback_after=0.3)
    ckpt.restore()
    step = goes_on(ckpt, weights, 1)
    (small / "somebody-else").write_bytes(b"x" * (7 << 20))
    weights = state["values"].weights = torch.zeros(1 << 20)
    step = until(lambda: ckpt.metrics.direct >= 5, ckpt, weights, step)
    (small / "somebody-else").unlink()
    weights = state["values"].weights = torch.zeros(1 << 17)
    step = until(lambda: ckpt.metrics.memory_back, ckpt, weights, step)
    ckpt.close(timeout=30)
    assert (ckpt.metrics.memory_lost, ckpt.metrics.memory_back, ckpt.metrics.failed) == (1, 1, 0)
    assert len([line for line in alarms() if line.startswith("step")]) == 2
    assert newest(root) == step


# -- storage has more than memory, and is away at the restart ----------------------------------------------------------


def job_in(root: Path, memory: Path, **more: Any) -> tuple[rekindle.Checkpointer, rekindle.Values]:
    values = rekindle.Values(weights=torch.zeros(1000))
    more = {"persist_seconds": 0, "keep": 2, "fallback_after": 1000.0} | more
    return rekindle.Checkpointer(root, {"values": values}, memory=memory, **more), values


def _outgrow_memory(root: Path, memory: Path, **more: Any) -> None:
    ckpt, values = job_in(root, memory, **more)
    ckpt.restore()
    for step in range(1, 5):
        ckpt.save(step, wait="memory")
    values.weights = torch.zeros(1 << 21)
    for step in range(5, 9):
        values.weights.fill_(step)
        ckpt.step(step)
    ckpt.save(8, wait="durable", timeout=30)


def outgrow_memory(root: Path, memory: Path, **more: Any) -> None:
    """A job whose memory has step 4 and whose storage has step 8, killed."""
    run_and_kill(_outgrow_memory, root, memory, **more)
    assert newest(root) == 8


def test_a_start_that_never_asks_what_there_was_is_refused_where_nobody_can_look(root: Path, memory: Path) -> None:
    first, _ = job_in(root, memory)
    first.restore()
    first.save(1, wait="durable", timeout=30)
    first.close(timeout=30)
    with unreadable(root / step_dir(1) / MANIFEST):
        ckpt, _ = job_in(root, memory / "elsewhere")
        with pytest.raises(rekindle.UsageError, match=r"call restore\(\) before the first step"):
            ckpt.step(1)
        ckpt.close()


@pytest.mark.parametrize("how", ["empty", "unreadable"])
@pytest.mark.parametrize("more", [{}, {"memory_limit": 1}], ids=["older memory", "no memory"])
def test_storage_that_is_away_at_the_restart_loses_nothing_that_it_had(
    how: str, more: dict[str, Any], disk: Disk, small_tmpfs: Callable[[int], Path]
) -> None:
    small, root = small_tmpfs(6 << 20), disk.root
    outgrow_memory(root, small, **more)
    disk.unmount()
    if how == "unreadable":
        root.write_text("in the way")
    why = r"step 8 was on storage, .* now.*: see that it is mounted; restore\(step=\d\)"
    for _ in range(2):  # the first start leaves to the second one what it needs to know
        if how == "unreadable" and more:
            with pytest.raises(rekindle.UsageError, match="there is a file where a directory should be"):
                job_in(root, small, **more)
            continue
        ckpt, _values = job_in(root, small, **more)
        with pytest.raises(rekindle.NotFoundError, match=why):
            ckpt.restore()
        ckpt.close()
    if how == "unreadable":
        root.unlink()
    assert not root.exists(), "nothing was written below the mount point"
    disk.mount()
    ckpt, values = job_in(root, small, **more)
    assert ckpt.restore() == 8 and torch.all(values.weights == 8)
    ckpt.save(9, wait="durable", timeout=30)
    ckpt.close(timeout=30)
    assert sound(root) == [9, 8]


def test_going_on_from_memory_on_purpose_where_storage_is_not_mounted(
    disk: Disk, small_tmpfs: Callable[[int], Path]
) -> None:
    small, root = small_tmpfs(6 << 20), disk.root
    outgrow_memory(root, small)
    disk.unmount()
    ckpt, _ = job_in(root, small)
    with pytest.raises(rekindle.NotFoundError, match=r"restore\(step=4\) goes on from step 4 on purpose"):
        ckpt.restore()
    assert ckpt.restore(step=4) == 4
    ckpt.save(5, wait="durable", timeout=30)
    ckpt.close(timeout=30)
    ckpt, _ = job_in(root, small)
    assert ckpt.restore() == 5, "the old note is forgotten"
    ckpt.close(timeout=30)


def test_a_restore_from_storage_notes_what_storage_has(disk: Disk, small_tmpfs: Callable[[int], Path]) -> None:
    """The next start must know of it too, though this one may be killed before its first save."""
    small, root = small_tmpfs(6 << 20), disk.root
    outgrow_memory(root, small)
    ckpt, _ = job_in(root, small)
    assert ckpt.restore() == 8
    del ckpt
    gc.collect()
    disk.unmount()
    ckpt, _ = job_in(root, small)
    with pytest.raises(rekindle.NotFoundError, match="step 8 was on storage"):
        ckpt.restore()
    ckpt.close()


def test_all_ranks_refuse_what_one_of_them_has_to(root: Path, memory: Path, job: JobDir) -> None:
    job.create()
    job.notes.write_durable(3)
    run = Run(root, memory, world=2, steps=3)
    assert train(run) == [1, 1]
    for rank in range(2):
        assert f"step 3 was on storage, and {root} shows nothing of it now" in run.log(rank).read_text()
    assert train(Run(root, memory, world=2, steps=3, restore_step=0)) == [0, 0]


def test_a_restore_without_storage_says_so(root: Path, memory: Path, alarms: Alarms) -> None:
    ckpt, _ = job_in(root, memory, persist_every=1000)
    ckpt.restore()
    root.write_text("in the way")  # of the agent too, which carries what a dead trainer has left
    ckpt.step(1)
    ckpt._saver.secure(10)
    del ckpt
    gc.collect()
    ckpt, _ = job_in(root, memory, persist_every=1000)
    assert ckpt.restore() == 1
    [line] = [line for line in alarms() if line.startswith("restored")]
    assert line.startswith(f"restored step 1 without storage, which may have a newer one: {root}")
    with pytest.raises(rekindle.NotDurableError):
        ckpt.close(1.0)


def test_an_agent_that_can_not_be_had_and_then_can(
    root: Path, memory: Path, job: JobDir, alarms: Alarms, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = torch.zeros(1000)
    ckpt = rekindle.Checkpointer(
        root, {"values": rekindle.Values(w=weights)}, memory=memory, persist_seconds=0, fallback_after=1.5
    )
    ckpt.restore()
    wait_for(lambda: ckpt.metrics.agent_back == ckpt.metrics.agent_lost and real_agent(job))
    agent, lost = real_agent(job), ckpt.metrics.agent_lost  # a slow start may have counted
    python = sys.executable
    monkeypatch.setattr(sys, "executable", "/bin/false")

    def none_lives() -> bool:  # a slow start may have left more than one that waits for its turn
        pid = real_agent(job)
        if pid:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return ckpt.metrics.agent_lost > lost

    step = until(none_lives, ckpt, weights, 0)
    step = until(lambda: job.agent() == os.getpid() and newest(root) > step, ckpt, weights, step)
    monkeypatch.setattr(sys, "executable", python)
    step = until(lambda: ckpt.metrics.agent_back == ckpt.metrics.agent_lost, ckpt, weights, step)
    assert real_agent(job) not in (None, agent)
    step = until(lambda: newest(root) > step, ckpt, weights, step)
    ckpt.close(timeout=30)
    changes = [line for line in alarms() if "agent" in line]  # a slow start is one, too
    assert len(changes) == ckpt.metrics.agent_lost + ckpt.metrics.agent_back, "one line for each"
    assert all(line.startswith("no agent on this node (it did not stay, see ") for line in changes[::2])
    assert all(line.startswith("an agent carries") for line in changes[1::2])
    assert ckpt.metrics.agent_lost > lost and ckpt.metrics.failed == 0


# -- never twice to the same place at once ---------------------------------------------------------------------------


def _publish(root: Path, stamp: ShardId, go: Path) -> None:
    while not go.exists():
        pass
    PosixStore(root).publish(stamp)


def test_a_trainer_and_an_agent_that_publish_one_step_at_once_never_write_into_each_others_file(tmp_path: Path) -> None:
    """What is published stays as it was, whoever else was about to do the same."""
    context = multiprocessing.get_context("fork")
    first = Incarnation(1, "a" * 16)
    for number in range(40):
        root, go = tmp_path / f"run-{number}", tmp_path / f"go-{number}"
        stamp = ShardId(5, 0, 1, first)
        receipt, data = make_shard(stamp, {"x": b"x" * 5000})
        PosixStore(root).write_shard(receipt, memoryview(data), lambda nbytes: None)
        both = [context.Process(target=_publish, args=(root, stamp, go)) for _ in range(2)]
        for process in both:
            process.start()
        go.touch()
        seen: set[bytes] = set()
        while any(process.is_alive() for process in both):
            for directory in root.glob("step-*"):
                try:
                    raw = (directory / MANIFEST).read_bytes()
                except OSError:
                    continue
                parse_document(raw, MANIFEST_KIND, directory)  # FormatError: somebody is still writing into it
                seen.add(raw)
        for process in both:
            process.join()
            assert process.exitcode == 0
        assert sound(root) == [5]
        PosixStore(root).clean_up()
        assert [path.name for path in root.glob("step-*")] == ["step-0000000005"]
