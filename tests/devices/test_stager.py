"""Copies of DCP's stager from a device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from rekindle.devices import batches
from rekindle.devices.batches import AHEAD
from rekindle.integrations.dcp.stager import RekindleStager
from tests.devices.fake import DEVICE, FakeBackend
from tests.devices.test_copies import SOON, launch_waits, run
from tests.faults.harness import wait_for


@pytest.mark.parametrize("locked", [True, False])
def test_staged_tensors_are_those_of_the_moment(device: FakeBackend, locked: bool) -> None:
    device.fail_register = int(not locked)
    stager, source = RekindleStager(), torch.zeros(5000)
    device.own(source)
    for step in range(1, 4):
        device.launch(lambda: source.data.add_(1.0), source)
        staged = stager.stage({"x": source, "number": step})
        assert torch.equal(staged["x"], torch.full((5000,), float(step)))
    stager.close()


def test_kernels_are_launched_while_a_state_is_staged(device: FakeBackend) -> None:
    device.fail_register = 1
    stager, source = RekindleStager(), torch.zeros(5000)
    device.own(source)
    release = device.stick()
    stages = run(lambda: (device.enter(DEVICE), stager.stage({"x": source})))
    waited = launch_waits(device)
    release.set()
    stages.join(SOON)
    stager.close()
    assert not waited and not stages.is_alive()


def test_a_large_tensor_is_staged_in_pieces_few_ahead(device: FakeBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    """A small copy of training's own would wait for all that is queued before it."""
    monkeypatch.setattr(batches, "DEVICE_BATCH", 1 << 12)
    queued: list[int] = []
    copy = device.copy

    def note(to: Sequence[torch.Tensor], source: Sequence[torch.Tensor]) -> None:
        copy(to, source)
        queued.append(sum(part.nbytes for part in source))

    monkeypatch.setattr(device, "copy", note)
    stager, source = RekindleStager(), torch.arange(50_000.0).view(500, 100)
    small = [torch.full((10,), float(number)) for number in range(300)]
    device.own(source, *small)
    release, found = device.stick(), dict[str, Any]()
    stages = run(lambda: (device.enter(DEVICE), found.update(stager.stage({"x": source, "small": small}))))
    wait_for(lambda: queued, what="a copy to be queued")
    stages.join(0.2)
    ahead = len(queued)
    release.set()
    stages.join(SOON)
    stager.close()
    assert ahead <= AHEAD and max(queued) <= 1 << 12
    assert torch.equal(found["x"], source)
    assert all(torch.equal(one, other) for one, other in zip(found["small"], small, strict=True))
    assert len(queued) < 500 + 300, "what is small goes together"
