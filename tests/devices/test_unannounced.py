"""Updates that a device makes and nobody announces: what they tear is never offered, and what is offered is right."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

import rekindle
from rekindle.memory.job_dir import JobDir, memory_base
from rekindle.save import to_memory
from rekindle.save.plan import Unit
from rekindle.save.progress import KEPT
from rekindle.save.witness import Witness
from tests.devices.fake import DEVICE, FakeBackend
from tests.devices.faulty import Job, check_shard
from tests.devices.training import Training, add
from tests.save.overlapped import snapshot_of, wait_for_memory

_LONG = 60.0
_SAID = "without an announcement"


class Idle(torch.optim.Optimizer):
    """Owns parameters that somebody else updates: its step() calls hooks, and does nothing."""

    def __init__(self, training: Training) -> None:
        super().__init__(training.model.parameters(), {"lr": 1.0})
        self.state.update(training.optimizer.state)

    def step(self, closure: Callable[[], float] | None = None) -> None:
        return None


class Unannounced(Training):
    """Makes its updates by work that calls no hook and counts no version, as a graph does that is replayed.

    With ``idle`` the optimizer's ``step()`` follows, as where kernels of the backward pass make the update.
    """

    def __init__(self, device: FakeBackend, *, idle: bool = False, **options: Any) -> None:
        super().__init__(device, **options)
        self._idle = idle
        self.optimizer = Idle(self)  # type: ignore[assignment]
        self.wrap: Callable[[], AbstractContextManager[None]] = nullcontext
        self.hold: threading.Event | None = None
        """Stops the device in the middle of the next update."""

    def update(self) -> None:
        self.forward()
        with self.wrap():
            self.replay()
        if self._idle:
            self.optimizer.step()

    def replay(self) -> None:
        hold, self.hold = self.hold, None
        for number, parameter in enumerate(self.model.parameters()):
            state = self.optimizer.state[parameter]
            state["step"].data.add_(1)
            if hold is not None and number == 1:
                self.device.current_stream(DEVICE).queue(lambda: self.device.wait_on_device(hold))
            self.device.launch(lambda p=parameter, m=state["moment"]: add(p, m))  # type: ignore[misc]


class Run:
    """Trains, and looks at each snapshot once the next update is queued."""

    def __init__(self, root: Path, memory: Path, training: Training, **options: Any) -> None:
        self.training, self.values = training, rekindle.Values(count=0)
        state = {**training.state, "values": self.values}
        self.ckpt = rekindle.Checkpointer(
            root, state, persist_every=10**9, **{"snapshot_every": 1, "overlap": True, **options}
        )
        self.job = JobDir.of(root, memory_base(memory))
        self.ckpt.restore()
        wait_for_memory(self.ckpt)
        self.done = 0
        self.right: list[int] = []
        self.none: list[int] = []

    def step(self) -> None:
        self.done += 1
        self.values.count = self.done
        self.ckpt.step(self.done)

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.training.update()
            if self.done:
                self.look()
            self.step()

    def look(self) -> None:
        self.training.device.settle()
        self.ckpt._saver.conclude()
        found = snapshot_of(self.job, self.done)
        if found.exists():
            check_shard(found, self.training, self.done)
        (self.right if found.exists() else self.none).append(self.done)


def test_a_graph_captured_before_is_copied_inside_of_step_and_that_is_said_once(
    device: FakeBackend, root: Path, memory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = Run(root, memory, Unannounced(device, layers=6))
    run.train(7)
    assert run.right == [1, 2, 3, 4, 5, 6] and run.ckpt.metrics.failed == 0
    assert caplog.text.count(_SAID) == 1 and "'with ckpt.updating():'" in caplog.text
    run.ckpt.close()


def test_inside_of_updating_a_graph_is_copied_beside_training(
    device: FakeBackend, root: Path, memory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    training = Unannounced(device, layers=6)
    run = Run(root, memory, training)
    training.wrap = run.ckpt.updating
    run.train(7)
    assert run.right == [1, 2, 3, 4, 5, 6] and _SAID not in caplog.text
    assert not run.ckpt.metrics.committed_in_step
    run.ckpt.close()


def copy_late(run: Run) -> threading.Event:
    """Has the copy of the next snapshot begin only once the event is set, or its update comes."""
    go = threading.Event()
    run.ckpt._saver.live.writer._behind.submit(go.wait)
    return go


@pytest.mark.parametrize("locked", [True, False])
def test_an_update_in_backward_tears_one_snapshot_which_is_not_offered(
    device: FakeBackend, root: Path, memory: Path, caplog: pytest.LogCaptureFixture, locked: bool
) -> None:
    """The optimizer's hook comes when all has been changed already."""
    device.fail_register = 0 if locked else 1
    training = Unannounced(device, idle=True, layers=6)
    run = Run(root, memory, training)
    training.update()
    go = copy_late(run)
    run.step()
    training.forward()
    training.replay()
    device.settle()
    training.optimizer.step()
    go.set()
    run.look()
    assert run.none == [1] and run.ckpt.metrics.failed == 1
    assert "model.weight" in caplog.text and "changed between ckpt.step(1)" in caplog.text
    run.step()
    run.train(5)
    assert run.right == [2, 3, 4, 5, 6] and run.none == [1] and caplog.text.count(_SAID) == 1
    run.ckpt.close()


@pytest.mark.parametrize("slowness", [0.0, 0.002, 0.01])
def test_updates_in_backward_beside_copies_never_tear_a_snapshot(
    device: FakeBackend, root: Path, memory: Path, slowness: float
) -> None:
    device.slowness = slowness
    run = Run(root, memory, Unannounced(device, idle=True, layers=12))
    run.train(12)  # looks at each one that there is
    assert len(run.right) >= 9
    run.ckpt.close()


def poke(training: Training, at: int) -> None:
    """Queues an unannounced write to one element."""
    weight = training.model.weight
    training.device.launch(lambda: weight.data[at].fill_(-1.0))


@pytest.mark.parametrize(("overlap", "number", "found"), [(True, 1, True), (True, 4, False), ("verify", 4, True)])
def test_all_bytes_are_compared_for_the_first_snapshots_and_by_verify(
    device: FakeBackend, root: Path, memory: Path, overlap: Any, number: int, found: bool
) -> None:
    """The element is none of those that a look takes."""
    training = Training(device)
    run = Run(root, memory, training, overlap=overlap)
    run.train(number - 1)
    training.update()
    if number > 1:
        run.look()
    go = copy_late(run)
    run.step()
    poke(training, 77)
    device.settle()
    go.set()
    run.ckpt._saver.conclude()
    assert snapshot_of(run.job, number).exists() != found and run.ckpt.metrics.failed == found
    run.ckpt.close()


@pytest.mark.parametrize("exact", [False, True])
def test_a_copy_that_is_not_what_the_device_held_is_torn(device: FakeBackend, exact: bool) -> None:
    """What was swapped in for the time of the copy, and out again, shows in no second look."""
    ones = torch.ones(1 << 16)
    tensors = [ones[:9], ones[1:9], ones[:64].view(8, 8).t(), ones, ones[:3].to(torch.bfloat16)]  # words of 4, 8, 2
    device.own(*tensors)
    at, units = 0, []
    for number, tensor in enumerate(tensors):
        units.append(Unit(tensor, tensor.data_ptr(), at, tensor.nbytes, number, tensor, 0, tensor.is_contiguous()))
        at += tensor.nbytes + 64
    shard = torch.zeros(at, dtype=torch.uint8)
    for unit in units:
        unit.view(shard.numpy(), 0).fill_(1)
    witness = Witness(units)
    look = witness.look(0, whole=exact)
    device.settle()

    def torn() -> list[int]:
        return sorted(unit.block for unit in witness.torn(look, shard.data_ptr(), [], exact=exact))

    assert torn() == []
    unseen = units[3].view(shard.numpy(), 0)
    unseen[77] = 7
    assert torn() == ([3] if exact else [])
    unseen[77] = 1
    for number, unit in enumerate(units):
        place = unit.view(shard.numpy(), 0).view(-1)
        place[len(place) // 2 if unit.in_order and number != 3 else 0] = 7
    assert torn() == [0, 1, 2, 3, 4]


def test_one_of_the_later_snapshots_is_compared_byte_by_byte(
    device: FakeBackend, root: Path, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(to_memory, "_EVERY", 3)
    training = Training(device)
    run = Run(root, memory, training)
    run.train(3)
    training.update()
    run.look()
    go = copy_late(run)
    run.step()
    poke(training, 77)
    device.settle()
    go.set()
    run.ckpt._saver.conclude()
    assert not snapshot_of(run.job, 4).exists()
    run.ckpt.close()


def test_what_is_written_between_the_copy_and_the_update_is_found_by_verify(
    device: FakeBackend, root: Path, memory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    training = Training(device)
    run = Run(root, memory, training, overlap="verify")
    run.train(1)
    device.settle()
    assert run.ckpt.latest() is not None
    poke(training, 77)
    training.update()
    run.ckpt._saver.conclude()
    assert "model.weight: changed between ckpt.step(1)" in caplog.text and run.ckpt.metrics.failed == 1
    run.ckpt.close()


def test_an_optimizer_on_a_stream_of_its_own_is_waited_for(device: FakeBackend, root: Path, memory: Path) -> None:
    """Training itself waits for it before the next forward pass, which comes after ckpt.step()."""
    training = Training(device, layers=4)
    side = device.new_stream(DEVICE)
    run = Run(root, memory, training)
    for n in range(1, 5):
        training.forward()
        side.wait_event(device.default.record_event())
        with device.on(side):
            hold = device.stick()
            training.optimizer.step()
        run.step()
        time.sleep(0.2)  # a copy that doesn't wait ends meanwhile
        hold.set()
        run.look()
        device.default.wait_event(side.record_event())
        assert run.right == list(range(1, n + 1)) and run.ckpt.metrics.failed == 0
    run.ckpt.close()


# -- dying gasps ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_gasp_amid_a_replayed_graph_secures_nothing_that_is_torn(
    device: FakeBackend, root: Path, memory: Path, wrapped: bool, caplog: pytest.LogCaptureFixture
) -> None:
    training = Unannounced(device, layers=2)
    job = Job(device, root, memory, training)
    training.wrap = job.ckpt.updating if wrapped else nullcontext
    with job.guarded() as guard:
        for _ in range(3):
            training.update()
            job.end()
        device.settle()
        training.hold = hold = threading.Event()
        training.update()
        job.fault(guard).join(_LONG)
        assert job.in_memory() == []
        hold.set()
        why = "its device was inside of an update" if wrapped else "announced the update that made step 3"
        assert why in caplog.text


def test_a_gasp_between_updates_that_updating_announces_secures_the_step(
    device: FakeBackend, root: Path, memory: Path
) -> None:
    training = Unannounced(device, layers=2)
    job = Job(device, root, memory, training)
    training.wrap = job.ckpt.updating
    with job.guarded() as guard:
        for _ in range(3):
            training.update()
            job.end()
        job.fault(guard).join(_LONG)
        job.check(3)


def test_a_gasp_amid_updates_in_backward_secures_nothing_once_one_was_seen(
    device: FakeBackend, root: Path, memory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """No snapshot is taken, so that only looks before announced updates can tell."""
    training = Unannounced(device, layers=2, idle=True)
    job = Job(device, root, memory, training)
    with job.guarded() as guard:
        for _ in range(KEPT + 1):
            training.update()
            job.end()
        device.settle()
        training.hold = hold = threading.Event()
        training.replay()
        job.fault(guard).join(_LONG)
        assert job.in_memory() == [] and caplog.text.count(_SAID) == 1
        hold.set()


def test_a_graph_captured_in_a_guarded_part_ends_the_trust_in_hooks(
    device: FakeBackend, root: Path, memory: Path
) -> None:
    """The step before its first replay was announced, by the update that was not captured."""
    training = Unannounced(device, layers=2, idle=True)
    job = Job(device, root, memory, training)
    with job.guarded() as guard:
        training.update()
        job.end()
        with device.capturing_graph():
            training.optimizer.step()
        device.settle()
        training.hold = hold = threading.Event()
        training.replay()
        job.fault(guard).join(_LONG)
        assert job.in_memory() == []
        hold.set()
