"""No step waits for memory to be made: it is left out, told of once, and lost neither to close() nor to a fault."""

from __future__ import annotations

import logging
import threading
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

import rekindle
from rekindle.memory import pages
from rekindle.memory.slot import Slot
from rekindle.memory.slots import NotReadyError, Slots
from rekindle.save.copy import Copying
from rekindle.storage.posix import PosixStore
from tests.memory.gate import Gate
from tests.save.overlapped import wait_for_memory

NOWHERE = "/proc/none"
"""A directory in which there can be no memory store."""

WIDTH = 2100
"""17 MB, which are too many for memory to be made inside of ``step()``."""


OPTIONS = {"snapshot_every": 1, "persist_every": 10**6, "strict": True}


class Job:
    """A training of one matrix, and its Checkpointer."""

    def __init__(self, root: Path, momentum: float = 0.0, **options: object) -> None:
        self.model = torch.nn.Linear(WIDTH, WIDTH, bias=False)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1.0, momentum=momentum)
        self.values = rekindle.Values(step=0)
        self.state = {"model": self.model, "optimizer": self.optimizer, "values": self.values}
        self.ckpt = rekindle.Checkpointer(root, self.state, **{**OPTIONS, **options})
        self.first = self.ckpt.restore()

    def train(self, step: int) -> None:
        """One update and its ``step()``, after which the matrix is full of ``step``."""
        self.model.weight.grad = torch.zeros_like(self.model.weight)
        self.optimizer.step()
        with torch.no_grad():
            self.model.weight.fill_(step)
        self.values.step = step
        self.ckpt.step(step)

    def in_memory(self) -> list[int]:
        return [one.step for one in self.ckpt.checkpoints() if not one.durable]


def assert_whole(root: Path, step: int, **options: object) -> None:
    job = Job(root, **options)
    assert job.first == step == job.values.step
    assert torch.equal(job.model.weight, torch.full_like(job.model.weight, step))
    job.ckpt.close()


def test_steps_are_left_out_until_memory_is_ready(
    root: Path, memory: Path, gate: Gate, caplog: pytest.LogCaptureFixture
) -> None:
    job = Job(root)
    with caplog.at_level(logging.INFO, "rekindle"):
        for step in (1, 2, 3):
            job.train(step)
            assert job.in_memory() == []
        metrics = job.ckpt.metrics
        assert (metrics.left_out, metrics.saves, metrics.failed, metrics.direct) == (3, 0, 0, 0)
        gate.open.set()
        wait_for_memory(job.ckpt)
        job.train(4)
        job.train(5)
    assert job.in_memory() == [5, 4] and (metrics.left_out, metrics.saves) == (3, 2)
    lines = [record.getMessage() for record in caplog.records if "memory" in record.getMessage()]
    assert [line.split(":")[0] for line in lines if "snapshot" in line and "step" in line] == [
        "step 1 has no snapshot, nor have those after it until memory is ready, which slows no step() down",
        "memory is ready",
    ]
    assert "step 4 has a snapshot, the 3 before it have none" in caplog.text
    job.ckpt.close()
    assert_whole(root, 5)


def test_an_explicit_save_waits(root: Path, memory: Path, gate: Gate) -> None:
    job = Job(root)
    job.train(1)
    threading.Timer(0.1, gate.open.set).start()  # the thread is in the middle of a piece
    job.ckpt.save(1, wait="memory")
    assert job.in_memory() == [1] and job.ckpt.metrics.saves == 1
    job.ckpt.close()
    assert_whole(root, 1)


@pytest.mark.parametrize("wait", ["memory", "durable"])
def test_a_first_save_does_not_wait_for_a_thread_that_gets_no_core(
    wait: str, root: Path, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It makes what is left itself."""
    monkeypatch.setattr("rekindle.memory.maker.run_near", lambda _: time.sleep(0.5))
    job = Job(root)
    with torch.no_grad():
        job.model.weight.fill_(1)
    job.values.step = 1
    job.ckpt.save(1, wait=wait)
    assert job.ckpt.latest() is not None
    job.ckpt.close()
    assert_whole(root, 1)


def test_closing_brings_a_step_that_was_left_out_to_storage(root: Path, memory: Path, gate: Gate) -> None:
    job = Job(root)
    job.train(1)
    job.train(2)
    threading.Timer(0.1, gate.open.set).start()
    job.ckpt.close()
    assert [entry.stamp.step for entry in PosixStore(root).published()] == [2]
    assert_whole(root, 2)


class Unseen(torch.optim.Optimizer):
    """Adds one to its parameters where torch doesn't count the write, as fused kernels and many optimizers do."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__(model.parameters(), {"lr": 1.0})

    def step(self, closure: None = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            parameter.data.add_(1.0)


@pytest.mark.parametrize("guarded", [False, True])
@pytest.mark.parametrize("why", ["memory is being made", "storage is left in peace"])
def test_closing_does_not_save_a_step_whose_state_has_been_updated_since(
    why: str, guarded: bool, root: Path, memory: Path, gate: Gate, caplog: pytest.LogCaptureFixture
) -> None:
    model = torch.nn.Linear(WIDTH, WIDTH, bias=False)
    torch.nn.init.zeros_(model.weight)
    optimizer = Unseen(model)
    state = {"model": model, "optimizer": optimizer}
    options = {"persist_every": 10**6} if why == "memory is being made" else {"memory": NOWHERE}
    ckpt = rekindle.Checkpointer(root, state, **options)
    with ckpt.guard(watchdog=False) if guarded else nullcontext():
        for step in (1, 2):  # storage gets the first
            optimizer.step()
            ckpt.step(step)
        optimizer.step()  # of a step that is not told
    gate.open.set()
    ckpt.close()
    assert "step 2 was the last, and step " in caplog.text and "step 2 is durable" not in caplog.text
    again = rekindle.Checkpointer(root, state, **options)
    step = again.restore()
    assert step == (0 if why == "memory is being made" else 1)
    assert step == 0 or torch.equal(model.weight, torch.ones_like(model.weight))
    again.close()


def test_a_guarded_part_that_ends_or_fails_loses_no_step_that_was_left_out(
    root: Path, memory: Path, gate: Gate
) -> None:
    for step, wanted in ((1, None), (2, ValueError)):
        job = Job(root)
        assert job.first == step - 1
        gate.open.clear()
        opening = threading.Timer(0.1, gate.open.set)
        try:
            with job.ckpt.guard(watchdog=False):
                job.train(step)
                opening.start()
                if wanted is not None:
                    raise wanted
        except ValueError:
            assert wanted is not None
        assert job.in_memory()[:1] == [step]
        with pytest.raises(KeyError), job.ckpt:
            raise KeyError  # leaves without close(), which would do it too
    assert_whole(root, 2)


def test_a_state_that_grows_keeps_its_newest_snapshot(root: Path, memory: Path, gate: Gate) -> None:
    gate.open.set()
    job = Job(root)
    wait_for_memory(job.ckpt)
    job.train(1)
    job.train(2)
    gate.open.clear()
    job.model.extra = torch.nn.Parameter(torch.zeros(WIDTH, WIDTH))
    for step in (3, 4):
        job.train(step)
        assert job.in_memory()[0] == 2
    gate.open.set()
    wait_for_memory(job.ckpt)
    job.train(5)
    assert job.in_memory()[:2] == [5, 2] and job.ckpt.metrics.left_out == 2
    job.ckpt.close()


def test_a_state_that_outgrows_its_memory_at_each_step_gets_a_snapshot_now_and_then(
    root: Path, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, waited = pages._Making._make, list[int]()

    def note(making: pages._Making, start: int, stop: int) -> int:
        if threading.current_thread() is threading.main_thread():
            waited.append(stop - start)
        return make(making, start, stop)

    monkeypatch.setattr(pages._Making, "_make", note)
    job = Job(root)
    for step in range(1, 7):
        job.model.extra = torch.nn.Parameter(torch.zeros(WIDTH * (1 + step // 2), WIDTH * step))
        job.train(step)
        wait_for_memory(job.ckpt)
    assert job.in_memory() and job.ckpt.metrics.left_out < 6
    assert sum(waited) <= 6 * pages.AT_ONCE, "no step() waits for more"
    job.ckpt.close()


def test_growth_near_the_limit_of_memory_leaves_steps_out_and_fails_none(
    root: Path, memory: Path, small_tmpfs, caplog: pytest.LogCaptureFixture
) -> None:
    """What is made beyond a state that grows never takes the room of its other snapshot."""
    job = Job(root, memory=small_tmpfs(96 << 20))
    metrics = job.ckpt.metrics
    with caplog.at_level(logging.INFO, "rekindle"):
        for step in range(1, 7):  # two snapshots take 36, then 53, 71 and 88 MB
            wait_for_memory(job.ckpt)
            job.model.extra = torch.nn.Parameter(torch.zeros(WIDTH * min(step, 3) // 2, WIDTH))
            job.train(step)
    assert job.in_memory() == [6, 4] and metrics.left_out == 4
    assert (metrics.failed, metrics.direct, metrics.memory_lost) == (0, 0, 0)
    assert "step 1 has no snapshot, nor have those after it" in caplog.text
    assert "memory is ready: step 4 has a snapshot" in caplog.text
    job.ckpt.close()


def test_gaps_that_come_again_and_again_are_told_of_less_and_less(
    root: Path, memory: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    job = Job(root)
    wait_for_memory(job.ckpt)
    acquire = Slots.acquire

    def acquire_every_second(slots: Slots, step: int, *args: Any, **options: Any) -> Slot:
        if step % 2:
            raise NotReadyError("memory is being made")
        return acquire(slots, step, *args, **options)

    monkeypatch.setattr(Slots, "acquire", acquire_every_second)
    with caplog.at_level(logging.INFO, "rekindle"):
        for step in range(1, 13):
            job.train(step)
    assert job.ckpt.metrics.left_out == job.ckpt.metrics.saves == 6
    assert caplog.text.count("has no snapshot, nor have") == caplog.text.count("memory is ready: step") == 3
    job.ckpt.close()


def test_momentum_that_appears_at_the_first_step_is_foreseen(root: Path, memory: Path) -> None:
    job = Job(root, momentum=0.9)
    wait_for_memory(job.ckpt)
    for step in (1, 2, 3):
        job.train(step)
    assert job.in_memory()[:2] == [3, 2] and job.ckpt.metrics.left_out == 0
    job.ckpt.close()


def test_memory_that_turns_out_too_small_falls_back_to_storage(
    root: Path, memory: Path, small_tmpfs, caplog: pytest.LogCaptureFixture
) -> None:
    """And memory is tried again: what it gets then is made in the background too, while storage goes on."""
    small = small_tmpfs(48 << 20)
    job = Job(root, memory=small, strict=False, fallback_after=0.01, persist_every=None, persist_seconds=0)
    wait_for_memory(job.ckpt)
    hog = small / "somebody-else"
    hog.write_bytes(bytes(6 << 20))
    job.model.extra = torch.nn.Parameter(torch.zeros(WIDTH // 4, WIDTH))
    for step in range(1, 30):
        job.train(step)
        wait_for_memory(job.ckpt)
        if job.ckpt.metrics.memory_lost:
            break
    assert "goes straight to storage" in caplog.text and "no room left" in caplog.text
    hog.unlink()
    deadline = time.monotonic() + 60
    while not job.ckpt.metrics.memory_back:
        assert time.monotonic() < deadline
        step += 1
        job.train(step)
        time.sleep(0.01)
    assert job.ckpt.metrics.failed == 0
    job.ckpt.close()


def test_without_a_thread_for_the_rest_of_a_snapshot_it_is_completed_in_step(
    root: Path, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, refused = threading.Thread.start, []

    def refuse(thread: threading.Thread) -> None:
        if thread.name.startswith("rekindle-behind") and len(refused) < 2:
            refused.append(thread)
            raise RuntimeError("can't start new thread")
        start(thread)

    job = Job(root, overlap=True, strict=False)
    wait_for_memory(job.ckpt)
    monkeypatch.setattr(threading.Thread, "start", refuse)
    for step in (1, 2, 3, 4):
        job.train(step)
        assert job.ckpt.metrics.committed_in_step == (step < 3)
    assert len(refused) == 2 and job.in_memory()[:2] == [4, 3]
    assert (job.ckpt.metrics.saves, job.ckpt.metrics.failed) == (4, 0)
    job.ckpt.close()
    assert_whole(root, 4)


def test_waiting_for_the_copy_before_is_counted(root: Path, memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    finish, go = Copying.finish, threading.Event()

    def slow(copying: Copying) -> list[str]:
        assert go.wait(60.0)
        return finish(copying)

    monkeypatch.setattr(Copying, "finish", slow)
    job = Job(root, overlap=True)
    wait_for_memory(job.ckpt)
    job.optimizer.step()
    job.ckpt.step(1)
    metrics = job.ckpt.metrics
    assert metrics.settle_seconds == 0.0
    threading.Timer(0.3, go.set).start()
    job.ckpt.step(2)
    assert metrics.settle_seconds >= 0.2
    assert metrics.stalls[0] >= 0.2 and metrics.max_stall >= 0.2, "it is a cost of the save before"
    job.ckpt.close()
