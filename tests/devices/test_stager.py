"""Copies of DCP's stager from a device."""

from __future__ import annotations

import pytest
import torch

from rekindle.integrations.dcp.stager import RekindleStager
from tests.devices.fake import DEVICE, FakeBackend
from tests.devices.test_copies import SOON, run
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
    wait_for(lambda: device.under_way, what="a copy to be queued")
    launches = run(lambda: (device.enter(DEVICE), device.launch(lambda: None)))
    launches.join(SOON)
    waited = launches.is_alive()
    release.set()
    stages.join(SOON)
    stager.close()
    assert not waited and not stages.is_alive()
