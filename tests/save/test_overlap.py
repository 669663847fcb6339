"""Copies behind the training's back: they hold what ``step()`` was called with, whatever training does next."""

from __future__ import annotations

import os
import threading
import time
import weakref
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import rekindle
from rekindle.format.receipt import Receipt
from rekindle.memory.job_dir import JobDir, memory_base
from tests.faults.harness import wait_for
from tests.save.overlapped import WIDTH, Adversaries, content, snapshot_of, wait_for_memory


def run(root: Path, memory: Path, steps: int, overlap: bool) -> tuple[list[Any], int]:
    """What the snapshot of each step holds once the update after it is over, and how many were late for ``step()``."""
    training = Adversaries()
    ckpt = rekindle.Checkpointer(root, training.state, overlap=overlap, persist_every=10**6, strict=True)
    job = JobDir.of(root, memory_base(memory))
    ckpt.restore()
    found, late = [], 0
    training.update()
    for step in range(1, steps + 1):
        ckpt.step(step)
        late += not snapshot_of(job, step).exists()
        training.update()
        found.append(content(snapshot_of(job, step)))
    ckpt.close()
    return found, late


@pytest.mark.parametrize("steps", [25, pytest.param(200, marks=pytest.mark.campaign(seconds=60))])
def test_overlapped_snapshots_equal_those_copied_at_once(steps: int, root: Path, memory: Path) -> None:
    at_once, none_late = run(root / "at-once", memory, steps, overlap=False)
    overlapped, late = run(root / "overlapped", memory, steps, overlap=True)
    assert none_late == 0 and late > steps // 10, f"only {late} were still being copied when step() returned"
    others = [step for step, (a, b) in enumerate(zip(overlapped, at_once, strict=True), 1) if a != b]
    assert not others, f"the snapshots of steps {others} differ"
    assert len({shard for shard, _, _ in at_once}) == steps


def begin(root: Path, memory: Path, width: int = WIDTH) -> tuple[Adversaries, rekindle.Checkpointer, JobDir]:
    """A training at its first step, whose snapshots stay in memory; its checkpointer, and the job's directory."""
    training = Adversaries(width)
    ckpt = rekindle.Checkpointer(root, training.state, persist_every=10**6, strict=True, overlap=True)
    ckpt.restore()
    return training, ckpt, JobDir.of(root, memory_base(memory))


def test_a_snapshot_is_in_memory_before_the_update_touches_the_state(root: Path, memory: Path) -> None:
    training, ckpt, job = begin(root, memory)
    training.update()
    seen = []
    training.first.register_step_pre_hook(lambda *_: seen.append(snapshot_of(job, step).exists()))
    training.second.register_step_pre_hook(lambda *_: seen.append(snapshot_of(job, step).exists()))
    for step in range(1, 6):
        ckpt.step(step)
        training.update()
    assert seen == [True] * 10
    ckpt.close()


def test_an_update_in_another_thread_waits_too(root: Path, memory: Path) -> None:
    """As when gradients are applied while they are computed, by the threads that compute them."""
    training, ckpt, job = begin(root, memory)
    training.update()
    for step in range(1, 6):
        ckpt.step(step)
        expected = [p.detach().clone() for p in training.one.parameters()]
        thread = threading.Thread(target=training.update)
        thread.start()
        thread.join()
        receipt = snapshot_of(job, step)
        shard = receipt.with_suffix(".safetensors").read_bytes()
        found = Receipt.decode(receipt.read_bytes(), receipt)
        names = [f"one.{name}" for name, _ in training.one.named_parameters()]
        for name, tensor in zip(names, expected, strict=True):
            chunk = next(c for c in found.layout.chunks if c.name == name)
            data = shard[found.header_bytes + chunk.start : found.header_bytes + chunk.stop]
            assert data == tensor.numpy().tobytes()
    ckpt.close()


def test_what_no_optimizer_owns_is_copied_inside_of_step(root: Path, memory: Path) -> None:
    """An average of the weights, buffers, and the parameters of an optimizer that isn't in the state."""
    owned, average, foreign = (torch.nn.BatchNorm1d(200_000) for _ in range(3))
    optimizer = torch.optim.SGD(owned.parameters(), lr=1.0)
    ckpt = rekindle.Checkpointer(
        root,
        {"owned": owned, "average": average, "foreign": foreign, "optimizer": optimizer},
        strict=True,
        overlap=True,
    )
    ckpt.restore()
    torch.optim.SGD(foreign.parameters(), lr=1.0)
    ckpt.save(1)
    with torch.no_grad():
        owned.running_mean.fill_(9)
        average.weight.data.fill_(9)
        foreign.weight.data.fill_(9)
    assert [c.step for c in ckpt.checkpoints()] == [1]
    ckpt.close()
    again = [torch.nn.BatchNorm1d(200_000) for _ in range(3)]
    for module in again:
        torch.nn.init.constant_(module.weight, 5)
    other = torch.optim.SGD(again[0].parameters(), lr=1.0)
    ckpt = rekindle.Checkpointer(
        root, {"owned": again[0], "average": again[1], "foreign": again[2], "optimizer": other}, overlap=True
    )
    assert ckpt.restore() == 1
    for module in again:
        assert torch.equal(module.weight, torch.ones(200_000)) and torch.equal(
            module.running_mean, torch.zeros(200_000)
        )
    ckpt.close()


def test_frozen_parameters_may_be_averages_of_the_others(root: Path, memory: Path) -> None:
    """Beside trained ones, in inference mode, changed now and then: all of that is legal, and nothing is lost."""
    torch.manual_seed(0)
    with torch.inference_mode():
        still = torch.nn.Linear(300, 300)
    model = torch.nn.ModuleDict({"still": still.requires_grad_(False), "mean": torch.nn.Linear(900, 900)})
    model["mean"].requires_grad_(False)
    model["trained"] = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model["trained"].parameters(), lr=0.1)
    ckpt = rekindle.Checkpointer(
        root, {"model": model, "optimizer": optimizer}, snapshot_every=2, persist_every=10**6, strict=True, overlap=True
    )
    job = JobDir.of(root, memory_base(memory))
    ckpt.restore()
    for step in range(1, 9):
        optimizer.step()
        if step % 4 == 0:
            model["mean"].weight.data.mul_(2)
        ckpt.step(step)
    ckpt.save(8, wait="memory")
    assert snapshot_of(job, 8).exists() and ckpt.metrics.failed == 0
    ckpt.close()


def test_a_forked_child_waits_for_no_copy_of_its_parents(root: Path, memory: Path) -> None:
    training, ckpt, _ = begin(root, memory, 1500)
    wait_for_memory(ckpt)
    ckpt._saver.memory._live.writer._behind.submit(partial(time.sleep, 0.3))
    training.update()
    ckpt.step(1)
    child = os.fork()
    if child == 0:
        training.first.step()
        os._exit(7)
    deadline = time.monotonic() + 20
    while (ended := os.waitpid(child, os.WNOHANG))[0] == 0 and time.monotonic() < deadline:
        time.sleep(0.02)
    if ended[0] == 0:
        os.kill(child, 9)
        os.waitpid(child, 0)
    assert ended[0] == child and os.waitstatus_to_exitcode(ended[1]) == 7
    training.update()
    ckpt.save(2, wait="memory")
    ckpt.close()


def test_a_checkpointer_that_is_forgotten_keeps_its_place_until_its_copy_is_whole(root: Path, memory: Path) -> None:
    training, ckpt, job = begin(root, memory, 1500)
    wait_for_memory(ckpt)
    ckpt._saver.memory._live.writer._behind.submit(partial(time.sleep, 0.3))
    training.update()
    ckpt.step(1)
    del ckpt
    assert job.trainers() == {0: os.getpid()}
    training.update()
    again = Adversaries(1500)
    ckpt = rekindle.Checkpointer(root, again.state, overlap=True)  # waits until the place is free
    assert ckpt.restore() == 1
    ckpt.close()


class Plain:
    """An optimizer that torch's hooks know nothing of."""

    def __init__(self, parameters: Any) -> None:
        self.param_groups = [{"params": list(parameters)}]
        self.state = {"momentum": [torch.zeros_like(p) for p in self.param_groups[0]["params"]]}

    def step(self) -> None:
        for parameter, momentum in zip(self.param_groups[0]["params"], self.state["momentum"], strict=True):
            momentum.mul_(0.9).add_(parameter.grad)
            parameter.data.add_(momentum, alpha=-0.01)

    def state_dict(self) -> dict[str, Any]:
        return {"momentum": self.state["momentum"]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state["momentum"] = state["momentum"]


@pytest.mark.parametrize("wrapped", [False, True])
def test_optimizers_without_hooks(wrapped: bool, root: Path, memory: Path) -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(1500, 1500)
    optimizer = Plain(model.parameters())
    ckpt = rekindle.Checkpointer(
        root,
        {"model": model, "optimizer": optimizer},
        snapshot_every=1,
        persist_every=10**6,
        strict=True,
        overlap=True,
    )
    job = JobDir.of(root, memory_base(memory))
    ckpt.restore()
    wait_for_memory(ckpt)
    late = 0
    for step in range(1, 9):
        ckpt.step(step)
        late += not snapshot_of(job, step).exists()
        expected = model.weight.detach().clone(), optimizer.state["momentum"][0].clone()
        model(torch.randn(2, 1500)).square().mean().backward()
        if wrapped:
            with ckpt.updating():
                optimizer.step()
        else:
            optimizer.step()
        found = Receipt.decode(snapshot_of(job, step).read_bytes(), "")
        shard = snapshot_of(job, step).with_suffix(".safetensors").read_bytes()[found.header_bytes :]
        for name, tensor in zip(("model.weight", "optimizer.momentum.0"), expected, strict=True):
            chunk = next(c for c in found.layout.chunks if c.name == name)
            assert shard[chunk.start : chunk.stop] == tensor.numpy().tobytes()
    assert bool(late) == wrapped, "without a fence nothing is copied late, with one it is"
    ckpt.close()


def test_a_compiled_step_is_fenced(root: Path, memory: Path) -> None:
    training, ckpt, job = begin(root, memory, 64)
    compiled = torch.compile(training.second.step, backend="eager")
    for step in range(1, 4):
        ckpt.step(step)
        training.two(torch.randn(4, 8)).square().mean().backward()
        compiled()
        assert snapshot_of(job, step).exists()
        training.second.zero_grad()
    ckpt.close()


def test_a_step_without_an_update_keeps_its_snapshot(root: Path, memory: Path) -> None:
    """As when a gradient scaler skips the update: nobody calls the hook."""
    _, ckpt, job = begin(root, memory)
    for step in range(1, 6):
        ckpt.step(step)
    ckpt.save(5, wait="memory")
    assert snapshot_of(job, 5).exists() and snapshot_of(job, 4).exists()
    assert ckpt.metrics.failed == 0
    ckpt.close()


def test_closing_leaves_the_optimizer_as_it_was(root: Path, memory: Path) -> None:
    training = Adversaries(64)
    ckpt = rekindle.Checkpointer(root, training.state, overlap=True)
    ckpt.restore()
    assert training.first._optimizer_step_pre_hooks
    ckpt.step(1)
    ckpt.close()
    assert not training.first._optimizer_step_pre_hooks and not training.second._optimizer_step_pre_hooks


def test_hooks_keep_no_checkpointer_alive(root: Path, memory: Path) -> None:
    training = Adversaries(64)
    ckpt = rekindle.Checkpointer(root, training.state, overlap=True)
    ckpt.restore()
    first = weakref.ref(ckpt)
    del ckpt
    wait_for(lambda: first() is None, what="the first one to be forgotten")
    ckpt = rekindle.Checkpointer(root, training.state, overlap=True)
    ckpt.restore()
    training.update()
    ckpt.step(1)
    ckpt.close()
