"""Memory that is made for snapshots of a device."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from rekindle.common import numa
from rekindle.memory import pages
from tests.devices.fake import FakeBackend
from tests.devices.test_copies import checkpointer
from tests.devices.training import Training
from tests.save.overlapped import wait_for_memory


def test_memory_is_made_near_the_device(
    device: FakeBackend, root: Path, memory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel takes pages from the node of the processor that asks first."""
    mine = os.sched_getaffinity(0)
    near, device.node = max(mine), 0
    (tmp_path / "node0").mkdir()
    (tmp_path / "node0" / "cpulist").write_text(f"{near}\n")
    monkeypatch.setattr(numa, "_NODES", tmp_path)
    used: dict[str, set[int]] = {}
    populate = pages.populate

    def note(address: int, nbytes: int) -> None:
        used.setdefault(threading.current_thread().name, set()).update(os.sched_getaffinity(0))
        populate(address, nbytes)

    monkeypatch.setattr(pages, "populate", note)
    training = Training(device, size=3 << 20)
    ckpt = checkpointer(root, training)
    wait_for_memory(ckpt)
    ckpt.close()
    assert used["rekindle-memory"] == {near}
    assert os.sched_getaffinity(0) == mine
