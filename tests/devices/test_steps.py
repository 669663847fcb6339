"""The device decides which step a fault's survivors secure, however far ahead of it the host is."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from tests.devices.fake import FakeBackend
from tests.devices.faulty import Job

_LONG = 60.0


@pytest.mark.parametrize("ahead", [0, 1, 2])
@pytest.mark.parametrize("every", [10**9, 1])
def test_a_stuck_device_holds_the_step_before(
    device: FakeBackend, root: Path, memory: Path, ahead: int, every: int
) -> None:
    """The host has completed later steps than the device, which waits for a dead rank."""
    job = Job(device, root, memory, snapshot_every=every)
    with job.guarded() as guard:
        for _ in range(3):
            job.step()
        never = threading.Event()
        if every == 1:
            ahead = min(ahead, 1)  # the next step() waits for the snapshot
        for number in range(ahead):
            job.step(never if number == 0 else None)
        job.fault(guard).join(_LONG)
        job.check(3)
        assert max(job.in_memory()) == 3
