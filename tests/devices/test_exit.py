"""The end of a process whose device is stuck."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

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


def test_an_exception_ends_a_process_whose_device_is_stuck(root: Path, memory: Path) -> None:
    """The copies behind training wait for the device: without a bound the process would wait for them."""
    for kind in ("locked", "unlocked"):
        ended = subprocess.run(
            [sys.executable, "-c", SCRIPT, str(root / kind), kind], capture_output=True, text=True, timeout=120
        )
        assert ended.returncode == 1, ended.stderr
        assert "ValueError: training has failed" in ended.stderr
