"""Real faults of a process whose device is behind: what the next start goes on from is bit for bit what it was."""

from __future__ import annotations

import logging
import os
import signal
import time
from pathlib import Path

import pytest

import rekindle
from rekindle.devices import table
from tests.devices.fake import KIND, FakeBackend
from tests.devices.training import Training
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
