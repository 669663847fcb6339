"""Copies behind the training's back: they hold what ``step()`` was called with, whatever training does next."""

from __future__ import annotations

import logging
import os
import random
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash

import rekindle
from rekindle.format.names import receipt_name, step_dir
from rekindle.format.receipt import Receipt
from rekindle.memory.job_dir import JobDir, memory_base
from rekindle.save.copy import Copying
from rekindle.save.to_memory import Changed, Flight
from tests.faults.harness import wait_for

WIDTH = 700
"""Makes 8 MB of state: a copy that takes milliseconds."""


class Adversaries:
    """Two networks, two optimizers, dropout, batch statistics, clipping, a schedule: everything moves at each step."""

    def __init__(self, width: int = WIDTH) -> None:
        torch.manual_seed(7)
        random.seed(7)
        self.one = torch.nn.Sequential(
            torch.nn.Linear(width, width), torch.nn.BatchNorm1d(width), torch.nn.Dropout(0.2), torch.nn.Linear(width, 8)
        )
        self.two = torch.nn.Sequential(torch.nn.Linear(8, width), torch.nn.Dropout(0.1), torch.nn.Linear(width, width))
        self.first = torch.optim.AdamW(self.one.parameters(), lr=1e-3)
        self.second = torch.optim.SGD(self.two.parameters(), lr=1e-2, momentum=0.9)
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.first, 200)
        self.width = width

    @property
    def state(self) -> dict[str, Any]:
        return {k: v for k, v in vars(self).items() if k != "width"}

    def update(self) -> None:
        noise = torch.randn(4, self.width) * random.random()
        loss = (self.two(self.one(noise)) - noise).square().mean()
        self.first.zero_grad()
        self.second.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_([*self.one.parameters(), *self.two.parameters()], 0.5)
        self.second.step()
        self.first.step()
        self.schedule.step()


def snapshot_of(job: JobDir, step: int) -> Path:
    return job.path / step_dir(step) / receipt_name(0, 1)


def content(receipt: Path) -> tuple[str, Any, Any]:
    """What a snapshot holds, without who saved it when: hash of the shard, and everything else that it says."""
    found = Receipt.decode(receipt.read_bytes(), receipt)
    shard = xxhash.xxh3_128_hexdigest(receipt.with_suffix(".safetensors").read_bytes())
    return shard, found.checksums, (found.structure, found.values)


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


def test_two_hundred_overlapped_snapshots_equal_those_copied_at_once(root: Path, memory: Path) -> None:
    at_once, none_late = run(root / "at-once", memory, 200, overlap=False)
    overlapped, late = run(root / "overlapped", memory, 200, overlap=True)
    assert none_late == 0 and late > 20, f"only {late} of 200 were still being copied when step() returned"
    assert overlapped == at_once
    assert len({shard for shard, _, _ in at_once}) == 200


def test_a_snapshot_is_in_memory_before_the_update_touches_the_state(root: Path, memory: Path) -> None:
    training = Adversaries()
    ckpt = rekindle.Checkpointer(root, training.state, persist_every=10**6, overlap=True)
    job = JobDir.of(root, memory_base(memory))
    ckpt.restore()
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
    training = Adversaries()
    ckpt = rekindle.Checkpointer(root, training.state, persist_every=10**6, strict=True, overlap=True)
    job = JobDir.of(root, memory_base(memory))
    ckpt.restore()
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


def clip(model: torch.nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.clamp_(-1e-3, 1e-3)


def clip_unseen(model: torch.nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data.clamp_(-1e-3, 1e-3)  # ``data`` has a version counter of its own


def test_a_late_writer_is_named_and_never_makes_a_torn_snapshot(
    root: Path, memory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    training = Adversaries(1500)
    ckpt = rekindle.Checkpointer(root, training.state, persist_every=10**6, overlap=True)
    job = JobDir.of(root, memory_base(memory))
    ckpt.restore()
    training.update()
    caught: list[set[str]] = []  # by save that failed: the copy may be over before all that changes has changed
    for step in range(1, 5):
        before = {name: p.detach().clone() for name, p in training.one.named_parameters()}
        with caplog.at_level(logging.ERROR, "rekindle"):
            ckpt.step(step)
            clip(training.one)  # too late: should have been done before step()
            training.update()
        flight = flight_of(ckpt)
        if not flight.committed:
            assert isinstance(flight.error, Changed)
            caught.append(set(flight.error.names))
        assert snapshot_of(job, step).exists() == flight.committed
        if snapshot_of(job, step).exists():  # it has the weights as they were at step(), not as they were clipped
            found = Receipt.decode(snapshot_of(job, step).read_bytes(), "")
            chunk = next(c for c in found.layout.chunks if c.name == "one.0.weight")
            shard = snapshot_of(job, step).with_suffix(".safetensors").read_bytes()[found.header_bytes :]
            assert shard[chunk.start : chunk.stop] == before["0.weight"].numpy().tobytes()
    ckpt.close()
    assert len(caught) == ckpt.metrics.failed
    assert len(set[str]().union(*caught)) == sum(map(len, caught)), "what was caught is copied inside of step() since"
    assert not caught or ("one.0." in caplog.text and "ckpt.updating()" in caplog.text)


FREES = """
import os, sys, threading, time, torch, rekindle
model = torch.nn.Linear(4096, 4096, bias=False)  # 64 MiB, which go back to the system at once
optimizer = torch.optim.SGD(model.parameters())
hashed = []

def watch(frame, event, what):
    if event == "c_call" and frame.f_code.co_name == "_move" and what.__name__ == "update":
        hashed.append(what)
        if len(hashed) == 2:
            model.weight.untyped_storage().resize_(0)

threading.setprofile(watch)
sys.setprofile(watch)
ckpt = rekindle.Checkpointer(sys.argv[1], {"model": model, "optimizer": optimizer}, memory=sys.argv[2], overlap=True)
ckpt.restore()
ckpt.step(1)
while not ckpt._saves.memory.flight._landed:  # settle() would help to copy, and read on while the other thread frees
    time.sleep(0.01)
ckpt._saves.settle()
print(ckpt.metrics.failed, len(hashed), flush=True)
os._exit(0)
"""


def test_memory_that_is_freed_under_the_copy_costs_the_save_and_not_the_trainer(root: Path, memory: Path) -> None:
    """Between two pieces of one block."""
    command = [sys.executable, "-c", FREES, str(root), str(memory)]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "LOCAL_WORLD_SIZE": "64"}  # one thread copies
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout.split()) == (0, ["1", "2"]), done.stderr
    assert "freed or resized while it was being copied" in done.stderr


def flight_of(ckpt: rekindle.Checkpointer) -> Flight:
    """The newest save, which is over when this returns."""
    assert ckpt._saves.memory is not None
    flight = ckpt._saves.memory.flight
    assert flight is not None
    flight.land()
    return flight


def test_a_late_write_that_outlasts_the_copy_is_noticed_too(
    root: Path, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch counts a write when it is over, so a count that hasn't moved when the copy ends proves nothing yet."""
    monkeypatch.setattr(
        "rekindle.save.to_memory._WRITE", 60.0
    )  # on a busy machine it may take longer than is waited for
    model = torch.nn.Linear(2048, 2048, bias=False)
    ckpt = rekindle.Checkpointer(root, {"model": model, "sgd": torch.optim.SGD(model.parameters())})
    ckpt.restore()
    ckpt.save(1, wait="memory")
    ckpt.step(2)
    with torch.no_grad():
        model.weight.polygamma_(3)  # starts at once, and takes its time
    flight = flight_of(ckpt)
    assert not flight.committed and isinstance(flight.error, Changed)
    ckpt.close()


def trained_by_hand(root: Path) -> rekindle.Checkpointer:
    model = torch.nn.Linear(2048, 2048)
    ckpt = rekindle.Checkpointer(root, {"model": model, "sgd": torch.optim.SGD(model.parameters())})
    ckpt.restore()
    return ckpt


def test_a_trainer_that_comes_for_the_save_is_not_waited_for(
    root: Path, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copying thread has begun to wait for a device, and the trainer now waits for the copying thread."""
    monkeypatch.setattr("rekindle.save.to_memory._WRITE", 60.0)
    ckpt, finish, copied = trained_by_hand(root), Copying.finish, threading.Event()

    def on_a_device(copying: Copying) -> list[str]:
        sums = finish(copying)
        if threading.current_thread() is not threading.main_thread():
            copied.set()
            time.sleep(0.3)  # as long as the transfer takes
        return sums

    monkeypatch.setattr(Copying, "finish", on_a_device)
    ckpt.step(1)
    assert copied.wait(20)
    began = time.monotonic()
    assert ckpt.latest().step == 1
    assert time.monotonic() - began < 30
    ckpt.close()


def test_a_dying_gasp_does_not_wait_for_a_trainer_that_hangs(
    root: Path, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rekindle.save.to_memory._WRITE", 60.0)
    ckpt = trained_by_hand(root)
    end, go = os.pipe()
    hangs = threading.Event()

    def train() -> None:
        ckpt.step(1)
        hangs.set()
        os.read(end, 1)

    trainer = threading.Thread(target=train)
    trainer.start()
    assert hangs.wait(20)
    began = time.monotonic()
    ckpt._saves.gasp(ckpt._stamp(1), whole=False)
    took = time.monotonic() - began
    os.write(go, b"x")
    trainer.join()
    assert took < 30 and flight_of(ckpt).committed
    ckpt.close()


@pytest.mark.parametrize("writer", [clip, clip_unseen])
def test_verify_finds_every_late_writer(
    writer: Any, root: Path, memory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    training = Adversaries(64)
    ckpt = rekindle.Checkpointer(root, training.state, overlap="verify", persist_every=10**6)
    ckpt.restore()
    with caplog.at_level(logging.ERROR, "rekindle"):
        for step in range(1, 4):
            training.update()
            ckpt.step(step)
        assert ckpt.metrics.failed == 0 and not caplog.text
        writer(training.two)
        training.update()
        ckpt.step(4)
    assert ckpt.metrics.failed == 1
    assert "two.0.weight" in caplog.text and "ckpt.step(3)" in caplog.text
    ckpt.close()


def test_verify_raises_where_failures_are_to_be_raised(root: Path, memory: Path) -> None:
    training = Adversaries(64)
    ckpt = rekindle.Checkpointer(root, training.state, overlap="verify", strict=True)
    ckpt.restore()
    ckpt.step(1)
    clip_unseen(training.one)
    training.update()
    # What had been copied before the change is not named.
    with pytest.raises(rekindle.UsageError, match=r"one\.\d\.(weight|bias).*ckpt\.step\(1\)"):
        ckpt.step(2)


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


def test_memory_that_is_taken_away_in_the_window_costs_the_snapshot_at_most(root: Path, memory: Path) -> None:
    model = torch.nn.ParameterList([torch.nn.Parameter(torch.zeros(1 << 20)) for _ in range(8)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ckpt = rekindle.Checkpointer(root, {"model": model, "optimizer": optimizer}, persist_every=10**6, overlap=True)
    ckpt.restore()
    flight = None
    ckpt._saves.memory._live.writer._behind.submit(time.sleep, 0.3)  # the copy can't begin before
    ckpt.step(1)
    flight = ckpt._saves.memory.flight
    model[7].untyped_storage().resize_(0)
    with torch.no_grad():
        model[7].set_(torch.zeros(1 << 20))
    optimizer.step()
    assert flight.error is not None and not flight.committed
    ckpt.step(2)
    ckpt.save(2, wait="memory")
    assert ckpt.metrics.failed == 1
    ckpt.close()


def test_a_forked_child_waits_for_no_copy_of_its_parents(root: Path, memory: Path) -> None:
    training = Adversaries(1500)
    ckpt = rekindle.Checkpointer(root, training.state, persist_every=10**6, strict=True, overlap=True)
    ckpt.restore()
    ckpt._saves.memory._live.writer._behind.submit(time.sleep, 0.3)
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
    ckpt.save(1, wait="memory")
    ckpt.close()


def test_a_checkpointer_that_is_forgotten_keeps_its_place_until_its_copy_is_whole(root: Path, memory: Path) -> None:
    training = Adversaries(1500)
    ckpt = rekindle.Checkpointer(root, training.state, persist_every=10**6, overlap=True)
    job = JobDir.of(root, memory_base(memory))
    ckpt.restore()
    ckpt._saves.memory._live.writer._behind.submit(time.sleep, 0.3)
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
        root, {"model": model, "optimizer": optimizer}, persist_every=10**6, strict=True, overlap=True
    )
    job = JobDir.of(root, memory_base(memory))
    ckpt.restore()
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
    training = Adversaries(64)
    ckpt = rekindle.Checkpointer(root, training.state, persist_every=10**6, strict=True, overlap=True)
    job = JobDir.of(root, memory_base(memory))
    ckpt.restore()
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
    training = Adversaries()
    ckpt = rekindle.Checkpointer(root, training.state, persist_every=10**6, strict=True, overlap=True)
    job = JobDir.of(root, memory_base(memory))
    ckpt.restore()
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


def test_a_parameter_that_gets_other_memory_in_the_window(root: Path, memory: Path) -> None:
    torch.manual_seed(1)
    model = torch.nn.Linear(2000, 2000)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ckpt = rekindle.Checkpointer(
        root, {"model": model, "optimizer": optimizer}, persist_every=10**6, strict=True, overlap=True
    )
    job = JobDir.of(root, memory_base(memory))
    ckpt.restore()
    expected = model.weight.detach().clone()
    ckpt.step(1)
    model.weight.data = torch.full((2000, 2000), 3.0)
    ckpt.save(1, wait="memory")
    found = Receipt.decode(snapshot_of(job, 1).read_bytes(), "")
    shard = snapshot_of(job, 1).with_suffix(".safetensors").read_bytes()[found.header_bytes :]
    chunk = next(c for c in found.layout.chunks if c.name == "model.weight")
    assert shard[chunk.start : chunk.stop] == expected.numpy().tobytes()
    ckpt.close()
