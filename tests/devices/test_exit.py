"""The end of a process whose device is stuck."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import sys
import rekindle
from rekindle.devices import table
from tests.devices.fake import KIND, FakeBackend
from tests.devices.training import Training

device = FakeBackend()
device.fail_register = int(sys.argv[2] == "unlocked")
table._backends[KIND], table._device = device, device.device_of
training = Training(device, buffer=False)
ckpt = rekindle.Checkpointer(sys.argv[1], training.state, overlap=True, persist_every=10**6)
ckpt.restore()
training.update()
ckpt.save(1, wait="memory")
training.update()
device.stick()
ckpt.step(2)
raise ValueError("training has failed")
"""


INTERRUPTED = """
import os
import signal
import sys
import threading
import time
import rekindle
from rekindle.devices import bounce, table
from rekindle.save import plan
from tests.devices.fake import KIND, FakeBackend
from tests.devices.training import Training

signal.signal(signal.SIGINT, signal.default_int_handler)  # shells have their background jobs ignore it
os.sched_getaffinity = lambda pid: set(range(8))
plan.DEVICE_BATCH = 1
device = FakeBackend()
device.fail_register = 1
table._backends[KIND], table._device = device, device.device_of
training = Training(device, size=10_000, layers=12, buffer=False)
ckpt = rekindle.Checkpointer(sys.argv[1], training.state, overlap=True, persist_every=10**6)
ckpt.restore()
training.update()
ckpt.save(1, wait="memory")
training.update()
device.stick()
ckpt.step(2)

def interrupt():
    while device.under_way < bounce._BUFFERS:
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGINT)

threading.Thread(target=interrupt, daemon=True).start()
training.update()
"""


@pytest.mark.campaign(seconds=17)
def test_an_exception_ends_a_process_whose_device_is_stuck(root: Path, memory: Path) -> None:
    """The copies behind training wait for the device: without a bound the process would wait for them."""
    command = [sys.executable, "-c", SCRIPT]
    kinds = ("locked", "unlocked")
    ending = [subprocess.Popen([*command, str(root / kind), kind], stderr=subprocess.PIPE, text=True) for kind in kinds]
    try:
        told = [process.communicate(timeout=120)[1] for process in ending]
    finally:
        for process in ending:
            process.kill()
    for process, errors in zip(ending, told, strict=True):
        assert process.returncode == 1, errors
        assert "ValueError: training has failed" in errors


@pytest.mark.campaign(seconds=12)
def test_an_interrupt_ends_a_process_whose_copies_wait_for_each_other(root: Path, memory: Path) -> None:
    """More threads copy by way of page-locked buffers than there are buffers, and none gets free."""
    ended = subprocess.run([sys.executable, "-c", INTERRUPTED, str(root)], capture_output=True, text=True, timeout=120)
    assert ended.returncode == -signal.SIGINT, ended.stderr
    assert "KeyboardInterrupt" in ended.stderr
