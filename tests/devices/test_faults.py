"""Real faults of a process whose device is behind: what the next start goes on from is bit for bit what it was."""

from __future__ import annotations

import json
import logging
import os
import signal
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import rekindle
from rekindle.devices import table
from rekindle.faults.torchelastic import SURVIVOR_EXIT
from tests.devices.fake import KIND, FakeBackend
from tests.devices.training import Training
from tests.faults.harness import wait_for
from tests.fork_server import context

_STEPS = 8


def _trainer(root: Path, memory: Path, fault: str, attempt: int, notes: Path) -> None:
    os.dup2(os.open(notes.with_suffix(".log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
    logging.basicConfig(level=logging.INFO, force=True, format="%(message)s")
    device = FakeBackend(attempt, 0.01)
    table._backends[KIND] = device
    table._device = device.device_of
    training, values = Training(device), rekindle.Values(count=0)
    state = {**training.state, "values": values}
    ckpt = rekindle.Checkpointer(root, state, memory=memory, snapshot_every=10**9, persist_every=10**9)
    step = ckpt.restore()
    if attempt:
        training.update()
    device.settle()
    weight, made = training.model.weight, step + bool(attempt)
    kept = training.optimizer.state[weight]
    found = {"model.weight": weight, "model.seen": training.model.seen, "moment": kept["moment"], "step": kept["step"]}
    for name, value in {**training.expected(made), "step": float(made)}.items():
        assert (found[name] == value).all(), (name, step)
    assert values.count == step
    with notes.open("a") as file:
        file.write(f"{step}\n")
    if attempt:
        os._exit(0)
    with ckpt.guard(watchdog=False):
        for number in range(1, _STEPS + 1):
            training.forward()
            if fault.startswith("stuck") and number == _STEPS:
                device.stick()
            training.optimizer.step()
            values.count = number
            ckpt.step(number)
        if fault.endswith("SIGTERM"):
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(60)
        raise RuntimeError("a fault on purpose")


@pytest.mark.parametrize("fault", ["exception", "SIGTERM", "stuck, exception", "stuck, SIGTERM"])
def test_a_restart_goes_on_from_the_step_that_the_device_held(
    fault: str, root: Path, memory: Path, tmp_path: Path
) -> None:
    """The host has told of step 8. A device that goes on has come to its end; one that is stuck holds step 7."""
    notes = tmp_path / "notes"
    codes = []
    for attempt in (0, 1):
        process = context.Process(target=_trainer, args=(root, memory, fault, attempt, notes))
        process.start()
        process.join(120)
        if process.is_alive():
            process.kill()
            raise AssertionError(notes.with_suffix(".log").read_text())
        codes.append(process.exitcode)
    log = notes.with_suffix(".log").read_text()
    assert codes == [128 + signal.SIGTERM if fault.endswith("SIGTERM") else 1, 0], log
    expected = _STEPS - 1 if fault.startswith("stuck") else _STEPS
    assert notes.read_text().split() == ["0", str(expected)], log


_KILLED, _LAST = 8, 12


def _rank(root: Path, memory: Path, replicas: bool, rank: int, attempt: int, notes: Path) -> None:
    """Trains beside another rank. Rank 1 is killed once its device has done step 8; rank 0 hears of it from the agent.

    Without ``replicas`` each has parameters of its own and a snapshot of every step. With them it has none.
    """
    os.dup2(os.open(notes.with_suffix(".log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
    logging.basicConfig(level=logging.INFO, force=True, format=f"{attempt}/{rank}: %(message)s")
    meeting = f"file://{notes.with_name(f'meeting-{attempt}')}"
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=2)
    device = FakeBackend(2 * attempt + rank, 0.01)
    table._backends[KIND] = device
    table._device = device.device_of
    training, drawn = Training(device), rekindle.Values(total=0.0)
    training.model.weight.data.fill_(-1.0 if attempt else 0.0 if replicas else float(rank))
    state = {**training.state, "drawn": drawn}
    if replicas:
        state["model"] = DistributedDataParallel(training.model)
    torch.manual_seed(rank + attempt)
    every = 10**9 if replicas else 1
    ckpt = rekindle.Checkpointer(root, state, memory=memory, snapshot_every=every, persist_every=10**9)
    step = ckpt.restore()
    with ckpt.guard(watchdog=False) as guard:
        assert guard.connected(60)
        dist.barrier()  # the agent watches both
        for number in range(step + 1, _LAST + 1):
            training.update()
            drawn.total += torch.rand(()).item()
            ckpt.step(number)
            if number == _KILLED and attempt == 0:
                device.settle()
                ckpt._saver.conclude()
                steps = [one.step for one, _ in ckpt._session.job_dir.snapshots.shard_ids() if one.rank == rank]
                assert max(steps, default=None) == (None if replicas else _KILLED)
                stands = notes.with_name("stands")
                if rank == 1:
                    wait_for(stands.exists)
                    os.kill(os.getpid(), signal.SIGKILL)
                stands.touch()
                threading.Event().wait(60)  # as in a collective, for which the dead rank never comes
                os._exit(3)
    device.settle()
    assert not device.complaints
    kept = training.optimizer.state[training.model.weight]
    tensors = training.model.weight, training.model.seen, kept["moment"]
    found = [float(value) for tensor in tensors for value in tensor.unique()]
    with notes.open("a") as file:
        file.write(json.dumps([rank, step, *found, kept["step"].item(), drawn.total]) + "\n")
    os._exit(0)


@pytest.mark.parametrize("replicas", [False, True], ids=["private state", "replicas"])
def test_ranks_with_a_device_each_go_on_after_one_is_killed(
    replicas: bool, root: Path, memory: Path, tmp_path: Path
) -> None:
    """They end bit for bit as if nothing had happened: what each had of its own, and what only a survivor has left."""
    notes = tmp_path / "notes"
    codes = []
    for attempt in (0, 1):
        ranks = [context.Process(target=_rank, args=(root, memory, replicas, rank, attempt, notes)) for rank in (0, 1)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join(100)
        stuck = [process for process in ranks if process.is_alive()]
        for process in stuck:
            process.kill()
        log = notes.with_suffix(".log").read_text()
        assert not stuck, log
        codes.append([process.exitcode for process in ranks])
    assert codes == [[SURVIVOR_EXIT, -signal.SIGKILL], [0, 0]], log
    assert "0/0: fault: rank 1 " in log and f"0/0: rank 0's part of step {_KILLED} secured" in log, log
    ends = []
    for rank in (0, 1):
        random = torch.Generator().manual_seed(rank)
        total = 0.0
        for _ in range(_LAST):
            total += torch.rand((), generator=random).item()
        weight = _LAST * (_LAST + 1) / 2 + (0 if replicas else rank)
        ends.append([rank, _KILLED, weight, _LAST, _LAST, _LAST, total])
    assert sorted(json.loads(line) for line in notes.read_text().splitlines()) == ends, log
