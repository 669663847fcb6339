"""Prices of snapshots of a state on a device, which the host is ahead of."""

from __future__ import annotations

import threading
import time
from collections import deque
from pathlib import Path

import pytest

import rekindle
from rekindle.save.adaptive import Adaptive
from rekindle.save.step_clock import StepClock
from rekindle.save.step_lengths import Load, StepLengths
from tests.devices.fake import DEVICE, FakeBackend
from tests.devices.training import Training
from tests.save.overlapped import wait_for_memory

STEP, COPY, AHEAD = 0.02, 0.1, 6


def _train(ckpt: rekindle.Checkpointer, device: FakeBackend, training: Training, steps: int) -> None:
    """The device takes ``STEP`` for the forward of each step, and the host is ``AHEAD`` steps ahead of it."""
    ends: deque[threading.Event] = deque()
    for step in range(1, steps + 1):
        device.launch(lambda: time.sleep(STEP))
        training.optimizer.step()
        ckpt.step(step)
        ends.append(device.current_stream(DEVICE).mark())
        if len(ends) > AHEAD:
            device.wait_on_host(ends.popleft())


def test_the_price_is_what_the_device_waits(device: FakeBackend, root: Path, memory: Path) -> None:
    """The copy takes five steps, four of which the update waits for. The host waits for all that is queued, too."""
    device.slowness, device.copying = 0.0, COPY
    training = Training(device, buffer=False)
    ckpt = rekindle.Checkpointer(root, training.state, snapshot_budget=0.2, persist_every=10**6, rng=False)
    ckpt.restore()
    wait_for_memory(ckpt)
    _train(ckpt, device, training, 150)
    cadence = ckpt._saver.schedule._cadence
    assert isinstance(cadence, Adaptive)
    price, bare = cadence._price.known() or (0.0, 0.0)
    device.settle()
    device.copying = 0.0
    copied = 2 * COPY  # the parameters, and the moments
    assert STEP <= bare < 2 * STEP, "no step without a snapshot waits for a copy"
    assert copied - 2 * STEP < price < copied + 3 * STEP, price
    assert ckpt.metrics.snapshot_every == cadence.every > 20 and 3 <= ckpt.metrics.saves <= 8
    ckpt.close()


@pytest.mark.parametrize("told", [True, False])
def test_lengths_are_those_of_the_device_if_it_can_tell(device: FakeBackend, told: bool) -> None:
    """The host queues 20 steps of 10 ms in no time."""
    device.slowness, device.tells_times = 0.0, told
    clock = StepClock()
    lengths, found, load = StepLengths(clock, [DEVICE]), [], Load(0.5, 2.0, 1)
    for number in range(20):
        device.launch(lambda: time.sleep(0.01))
        clock.tick()
        found += lengths.stepped(load if number == 7 else None)
    if told:
        assert len(found) < 15
        device.settle()
        clock.tick()
        found += lengths.stepped(None)
        device.settle()
        found += lengths.stepped(None)
        assert [step.number for step in found[:19]] == list(range(2, 21))
        assert all(step.seconds > 0.009 for step in found[:19])
        assert found[6].load == Load(0.0, 2.0, 1), "the host's stall is not the device's"
    else:
        assert len(found) == 19 and found[6].load == load
        assert sum(step.seconds for step in found) < 0.1


def test_a_device_that_fails_leaves_the_host_s_clock(device: FakeBackend) -> None:
    clock = StepClock()
    lengths = StepLengths(clock, [DEVICE])
    for _ in range(3):
        clock.tick()
        lengths.stepped(None)
    device.lost = "an assertion in a kernel"
    clock.tick()
    assert [step.number for step in lengths.stepped(None)] == [4]
