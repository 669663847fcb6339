"""Changes of the state while it is copied: they are noticed and named, and never make a torn snapshot."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import rekindle
from rekindle.format.receipt import Receipt
from rekindle.memory.job_dir import JobDir, memory_base
from rekindle.save import pending as completing
from rekindle.save.copy import Copying
from rekindle.save.pending import Changed
from tests import forked
from tests.faults.harness import wait_for
from tests.save.overlapped import Adversaries, pending_of, snapshot_of, wait_for_memory


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
    ckpt = rekindle.Checkpointer(root, training.state, snapshot_every=1, persist_every=10**6, overlap=True)
    job = JobDir.of(root, memory_base(memory))
    ckpt.restore()
    wait_for_memory(ckpt)
    training.update()
    caught: list[set[str]] = []  # by save that failed: the copy may be over before all that changes has changed
    for step in range(1, 5):
        before = {name: p.detach().clone() for name, p in training.one.named_parameters()}
        with caplog.at_level(logging.ERROR, "rekindle"):
            ckpt.step(step)
            clip(training.one)  # too late: should have been done before step()
            training.update()
        pending = pending_of(ckpt)
        if not pending.committed:
            assert isinstance(pending.error, Changed)
            caught.append(set(pending.error.names))
        assert snapshot_of(job, step).exists() == pending.committed
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
assert ckpt._saver.memory.slots.wait_made(60)
optimizer.step()  # without gradients: nothing but the announcement
ckpt.step(1)
while not ckpt._saver.memory.pending._ended:  # conclude() would help to copy, and read on while the other thread frees
    time.sleep(0.01)
ckpt._saver.conclude()
print(ckpt.metrics.failed, len(hashed), flush=True)
os._exit(0)
"""


@pytest.mark.campaign(seconds=7)
def test_memory_that_is_freed_under_the_copy_costs_the_save_and_not_the_trainer(root: Path, memory: Path) -> None:
    """Between two pieces of one block."""
    command = [sys.executable, "-c", FREES, str(root), str(memory)]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "LOCAL_WORLD_SIZE": "64"}  # one thread copies
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout.split()) == (0, ["1", "2"]), done.stderr
    assert "freed or resized between" in done.stderr


RESIZES = """
import os, sys, threading, time, torch, rekindle
model = torch.nn.Linear(8, 8, bias=False)
model.weight = torch.nn.Parameter(torch.ones(2048, 2048).t())
optimizer = torch.optim.SGD(model.parameters())
ckpt = rekindle.Checkpointer(sys.argv[1], {"model": model, "optimizer": optimizer}, memory=sys.argv[2], overlap=True)
ckpt.restore()
assert ckpt._saver.memory.slots.wait_made(60)
storage, go = model.weight.untyped_storage(), threading.Event()
optimizer.step()  # without gradients: nothing but the announcement
ckpt._saver.live.writer._behind.submit(go.wait)  # the copy beside training can't begin before
ckpt.step(1)
storage.resize_(int(sys.argv[3]))
if storage.nbytes() > 1 << 20:
    storage.fill_(7)
go.set()
while not ckpt._saver.memory.pending._ended:
    time.sleep(0.01)
ckpt._saver.conclude()
print(ckpt.metrics.failed, flush=True)
os._exit(0)
"""


@pytest.mark.parametrize(
    "nbytes", [0, *(pytest.param(nbytes, marks=pytest.mark.campaign(seconds=8)) for nbytes in (16, 1 << 25))]
)
def test_memory_of_a_transposed_tensor_that_is_resized_before_the_copy_costs_the_save(
    nbytes: int, root: Path, memory: Path
) -> None:
    """Whether it has gone, is too small, or lies elsewhere with other values."""
    done = forked.run(forked.Code(RESIZES), root, memory, nbytes, timeout=120)
    assert (done.returncode, done.stdout.split()) == (0, ["1"]), done.stderr
    assert "freed or resized between" in done.stderr


def test_a_late_write_that_outlasts_the_copy_is_noticed_too(
    root: Path, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch counts a write when it is over, so a count that hasn't moved when the copy ends proves nothing yet."""
    monkeypatch.setattr(completing, "_LONGEST_WRITE", 60.0)  # on a busy machine it may take longer than is waited for
    model = torch.nn.Linear(2048, 2048, bias=False)
    optimizer = torch.optim.SGD(model.parameters())
    ckpt = rekindle.Checkpointer(root, {"model": model, "sgd": optimizer})
    ckpt.restore()
    wait_for_memory(ckpt)
    ckpt.save(1, wait="memory")
    optimizer.step()
    finish, first = Copying.finish, float(model.weight[0, 0])

    def once_written_to(copying: Copying) -> list[str]:
        wait_for(lambda: float(model.weight[0, 0]) != first, what="the write to begin")
        return finish(copying)

    monkeypatch.setattr(Copying, "finish", once_written_to)
    ckpt.step(2)
    with torch.no_grad():
        model.weight.polygamma_(3)  # takes longer than the copy
    pending = pending_of(ckpt)
    assert not pending.committed and isinstance(pending.error, Changed)
    ckpt.close()


def trained_by_hand(root: Path) -> rekindle.Checkpointer:
    model = torch.nn.Linear(2048, 2048)
    optimizer = torch.optim.SGD(model.parameters())
    ckpt = rekindle.Checkpointer(root, {"model": model, "sgd": optimizer})
    ckpt.restore()
    wait_for_memory(ckpt)
    optimizer.step()
    return ckpt


def test_a_trainer_that_comes_for_the_save_is_not_waited_for(
    root: Path, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copying thread has begun to wait for a device, and the trainer now waits for the copying thread."""
    monkeypatch.setattr(completing, "_LONGEST_WRITE", 60.0)
    ckpt, finish, copied = trained_by_hand(root), Copying.finish, threading.Event()

    def on_a_device(copying: Copying) -> list[str]:
        sums = finish(copying)
        if threading.current_thread() is not threading.main_thread():
            copied.set()
            time.sleep(0.3)  # as long as the transfer takes
        return sums

    monkeypatch.setattr(Copying, "finish", on_a_device)
    ckpt.step(1)
    assert copied.wait(60)
    began = time.monotonic()
    assert ckpt.latest().step == 1
    assert time.monotonic() - began < 30
    ckpt.close()


def test_a_dying_gasp_does_not_wait_for_a_trainer_that_hangs(
    root: Path, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(completing, "_LONGEST_WRITE", 60.0)
    ckpt = trained_by_hand(root)
    end, go = os.pipe()
    hangs = threading.Event()

    def train() -> None:
        ckpt.step(1)
        hangs.set()
        os.read(end, 1)

    trainer = threading.Thread(target=train)
    trainer.start()
    assert hangs.wait(60)
    began = time.monotonic()
    ckpt._saver.gasp(ckpt._session.shard_id(1, persist=False), whole=False)
    took = time.monotonic() - began
    os.write(go, b"x")
    trainer.join()
    assert took < 30 and pending_of(ckpt).committed
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


@pytest.mark.parametrize("overlap", [True, "verify"])
def test_what_was_swapped_in_for_the_time_of_the_copy_and_out_again_is_not_offered(
    overlap: Any, root: Path, memory: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As an average of the weights is, for an evaluation. Looks before and after see the same."""
    training = Adversaries(1500)
    ckpt = rekindle.Checkpointer(root, training.state, snapshot_every=1, persist_every=10**6, overlap=overlap)
    job = JobDir.of(root, memory_base(memory))
    ckpt.restore()
    wait_for_memory(ckpt)
    training.update()
    ckpt.step(1)
    training.update()
    weight = training.two[2].weight
    own = weight.detach().clone()
    copy_all = Copying.help

    def copy_while_swapped(copying: Copying) -> None:
        weight.data.fill_(0.5)
        copy_all(copying)
        weight.data.copy_(own)

    monkeypatch.setattr(Copying, "help", copy_while_swapped)
    with caplog.at_level(logging.ERROR, "rekindle"):
        ckpt.step(2)
        pending = ckpt._saver.memory.pending
        assert not pending.wait(60)
        training.update()
        ckpt.step(3)
    assert isinstance(pending.error, Changed) and set(pending.error.names) == {"two.2.weight"}
    assert not snapshot_of(job, 2).exists() and ckpt.metrics.failed == 1 and "two.2.weight" in caplog.text
    assert snapshot_of(job, 3).exists(), "it is copied inside of step() from then on"
    ckpt.close()


def test_verify_raises_where_failures_are_to_be_raised(root: Path, memory: Path) -> None:
    training = Adversaries(64)
    ckpt = rekindle.Checkpointer(root, training.state, overlap="verify", strict=True)
    ckpt.restore()
    training.update()
    ckpt.step(1)
    clip_unseen(training.one)
    training.update()
    # What had been copied before the change is not named.
    with pytest.raises(rekindle.UsageError, match=r"one\.\d\.(weight|bias).*ckpt\.step\(1\)"):
        ckpt.step(2)


def test_memory_that_is_taken_away_in_the_window_costs_one_snapshot_at_most(
    root: Path, memory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = torch.nn.ParameterList([torch.nn.Parameter(torch.zeros(1 << 20)) for _ in range(8)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ckpt = rekindle.Checkpointer(root, {"model": model, "optimizer": optimizer}, persist_every=10**6, overlap=True)
    ckpt.restore()
    wait_for_memory(ckpt)
    pending = None
    ckpt._saver.memory._live.writer._behind.submit(partial(time.sleep, 0.3))  # the copy can't begin before
    optimizer.step()
    ckpt.step(1)
    pending = ckpt._saver.memory.pending
    model[7].untyped_storage().resize_(0)
    with torch.no_grad():
        model[7].set_(torch.zeros(1 << 20))
    optimizer.step()
    assert pending.error is not None and not pending.committed
    ckpt.step(2)
    ckpt.save(2, wait="memory")
    assert ckpt.metrics.failed == 1 and "model.7: copied inside of step() from now on" in caplog.text
    for step in range(3, 8):  # what was seen once doesn't cost a snapshot each time
        ckpt.step(step)
        model[7].untyped_storage().resize_(0)
        model[7].untyped_storage().resize_(4 << 20)
        optimizer.step()
        ckpt._saver.conclude()
    assert ckpt.metrics.failed == 1
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
    wait_for_memory(ckpt)
    expected = model.weight.detach().clone()
    optimizer.step()
    ckpt.step(1)
    model.weight.data = torch.full((2000, 2000), 3.0)
    ckpt.save(1, wait="memory")
    found = Receipt.decode(snapshot_of(job, 1).read_bytes(), "")
    shard = snapshot_of(job, 1).with_suffix(".safetensors").read_bytes()[found.header_bytes :]
    chunk = next(c for c in found.layout.chunks if c.name == "model.weight")
    assert shard[chunk.start : chunk.stop] == expected.numpy().tobytes()
    ckpt.close()
