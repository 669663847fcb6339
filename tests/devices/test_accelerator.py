"""Devices behind torch's common interface of accelerators, shown on one that is added to torch as vendors add theirs.

The device is built from ``accelerator.cpp``, so each test goes through torch's own streams, events and operators. What
is registered with torch stays for the life of a process: each test has one of its own.
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import shutil
import subprocess
import traceback
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import rekindle
from rekindle.devices import table
from rekindle.devices.accelerator import Accelerator
from rekindle.devices.events import Event, record
from rekindle.devices.page_lock import PageLocker
from rekindle.devices.streams import SideStreams, ThreadStreams, copy_now, resume_after, synchronize
from rekindle.memory.job_dir import JobDir, memory_base
from tests.fork_server import context
from tests.save.overlapped import snapshot_of, wait_for_memory

SOON = 30.0
DEVICE = torch.device("privateuseone", 0)
NAME = "late"
"""Name of the kind of device, once it is there."""
COMPILER = shutil.which("g++")

pytestmark = [
    pytest.mark.skipif(COMPILER is None, reason="there is no g++"),
    pytest.mark.skipif(not hasattr(torch, "accelerator"), reason="torch is older than 2.6"),
]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The device, for ``torch.ops.load_library``."""
    built = tmp_path_factory.mktemp("accelerator") / "accelerator.so"
    home = Path(torch.__file__).parent
    headers = [f"-I{home}/include", f"-I{home}/include/torch/csrc/api/include"]
    source = Path(__file__).with_name("accelerator.cpp")
    assert COMPILER is not None
    command = [COMPILER, "-std=c++20", "-O0", "-shared", "-fPIC", *headers, str(source), "-o", str(built)]
    done = subprocess.run([*command, f"-L{home}/lib", "-ltorch_cpu", "-lc10"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return built


class Device:
    """What a test does to the device."""

    def __init__(self, library: Path) -> None:
        torch.ops.load_library(library)
        torch.utils.rename_privateuse1_backend(NAME)
        self._library = ctypes.CDLL(str(library))
        self.stick: Callable[[], None] = self._library.stick
        self.jam: Callable[[], None] = self._library.jam
        self.release: Callable[[], None] = self._library.release
        self.set_delay: Callable[[int], None] = self._library.set_delay
        module = types.ModuleType(f"torch.{NAME}")
        self.rng = torch.arange(16, dtype=torch.uint8)
        vars(module).update(
            is_available=lambda: True,
            device_count=lambda: 1,
            current_device=lambda: 0,
            set_device=lambda device: None,
            get_rng_state=lambda: self.rng.clone(),
            set_rng_state=self.rng.copy_,
        )
        torch._register_device_module(NAME, module)


def _work(case: Callable[..., None], library: Path, args: tuple[object, ...], log: Path) -> None:
    os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), 2)
    faulthandler.dump_traceback_later(100, file=2)
    try:
        case(Device(library), *args)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def run_alone(case: Callable[..., None], library: Path, tmp_path: Path, *args: object) -> None:
    """Runs ``case`` in a process of its own, with the device."""
    log = tmp_path / "log"
    process = context.Process(target=_work, args=(case, library, args, log))
    process.start()
    process.join(120)
    if process.is_alive():
        process.kill()
    assert process.exitcode == 0, log.read_text()


def on_device(values: float, size: int = 1000) -> torch.Tensor:
    return torch.full((size,), values, device=DEVICE)


def reached(event: Event | None) -> bool:
    assert event is not None, "a copy that doesn't wait has an event"
    return event.wait(SOON)


# -- what the table says ----------------------------------------------------------------------------------------


def _is_known(device: Device) -> None:
    backend = table.backend_of(DEVICE)
    assert type(backend) is Accelerator and backend in table.all_backends()
    assert table.device_of(on_device(0.0)) == DEVICE and not table.on_host(on_device(0.0))
    assert table.used([on_device(0.0), torch.zeros(1)]) == {DEVICE}
    assert table.current_devices() == [DEVICE] and backend.available() and not table.capturing()
    assert backend.numa_node(DEVICE) is None


@pytest.mark.campaign(seconds=16)
def test_the_device_is_driven_by_the_common_interface(library: Path, tmp_path: Path) -> None:
    run_alone(_is_known, library, tmp_path)


def _has_other_memory(device: Device) -> None:
    backend = table.backend_of(DEVICE)
    assert backend is not None
    made = backend.allocate(DEVICE, 100)
    assert made.device == DEVICE and not made.cpu().any()
    assert PageLocker().lock(memoryview_of(4096)) is None, "it can't lock memory that others have made"
    assert backend.pinned(100).device.type == "cpu"
    (state,) = backend.rng_states()
    device.rng.zero_()
    backend.set_rng_states([state, state])
    assert torch.equal(device.rng, state)


def memoryview_of(nbytes: int) -> ctypes.Array[ctypes.c_char]:
    return ctypes.create_string_buffer(nbytes)


def test_memory_and_generators(library: Path, tmp_path: Path) -> None:
    run_alone(_has_other_memory, library, tmp_path)


# -- order ------------------------------------------------------------------------------------------------------


def _copy_has_an_event(device: Device) -> None:
    source, to = on_device(0.0), torch.zeros(1000)
    device.stick()
    source.fill_(1.0)
    event = copy_now(DEVICE, [to], [source])
    assert event is not None and not event.reached() and not to.any()
    device.release()
    assert reached(event) and torch.equal(to, torch.ones(1000))


def test_a_copy_that_does_not_wait_has_an_event(library: Path, tmp_path: Path) -> None:
    run_alone(_copy_has_an_event, library, tmp_path)


def _copies_aside(device: Device) -> None:
    device.set_delay(300)
    source, side = on_device(0.0), SideStreams()
    for number in range(1, 20):
        to = torch.zeros(1000)
        source.fill_(float(number))
        side.catch_up([DEVICE])
        event = side.copy_aside(DEVICE, [to], [source])
        side.make_training_wait([event])
        source.fill_(-1.0)
        assert reached(event)
        assert torch.equal(to, torch.full((1000,), float(number))), number


def test_a_side_stream_copies_between_two_updates(library: Path, tmp_path: Path) -> None:
    run_alone(_copies_aside, library, tmp_path)


def _goes_beside(device: Device) -> None:
    source, to = on_device(1.0), torch.zeros(1000)
    before = record(DEVICE)
    assert reached(before)
    device.stick()
    source.fill_(2.0)
    side, event = SideStreams(), None
    with resume_after({DEVICE: before}, {}):
        side.catch_up([DEVICE])
        event = side.copy_aside(DEVICE, [to], [source])
    assert reached(event) and torch.equal(to, torch.ones(1000)), "the stream that trains still stands"
    device.release()
    synchronize([source])
    assert torch.equal(source.cpu(), torch.full((1000,), 2.0))


def test_what_stands_before_stuck_work_can_be_read(library: Path, tmp_path: Path) -> None:
    run_alone(_goes_beside, library, tmp_path)


def _keeps(device: Device) -> None:
    side, to = SideStreams(), torch.zeros(1000)
    backend = table.backend_of(DEVICE)
    assert backend is not None
    source = on_device(1.0)
    side.catch_up([DEVICE])
    with backend.on(side._streams[DEVICE]):
        device.stick()
    event = side.copy_aside(DEVICE, [to], [source])
    del source
    on_device(0.0)
    assert reached(record(DEVICE)), "training has gone on, and others may have been given the memory"
    device.release()
    assert reached(event) and torch.equal(to, torch.ones(1000))


def test_memory_that_is_freed_during_its_copy_is_kept(library: Path, tmp_path: Path) -> None:
    run_alone(_keeps, library, tmp_path)


def _streams_nest(device: Device) -> None:
    backend = table.backend_of(DEVICE)
    assert backend is not None
    home = backend.current_stream(DEVICE)
    one, two = backend.new_stream(DEVICE), backend.new_stream(DEVICE)
    with backend.on(one):
        with backend.on(two):
            assert backend.current_stream(DEVICE) == two
        assert backend.current_stream(DEVICE) == one
        with pytest.raises(ValueError), backend.on(two):
            raise ValueError
        assert backend.current_stream(DEVICE) == one
    assert backend.current_stream(DEVICE) == home != one


def test_streams_nest(library: Path, tmp_path: Path) -> None:
    run_alone(_streams_nest, library, tmp_path)


def _fills(device: Device) -> None:
    device.set_delay(300)
    to = on_device(0.0)
    synchronize([to])  # as before a restore: the copy goes by another stream than the filling with zeros
    ThreadStreams([to.device]).copy(to, torch.arange(1000.0))
    assert torch.equal(to.cpu(), torch.arange(1000.0)), "the stream that trains doesn't wait for it"


def test_a_copy_to_the_device_has_ended_when_it_returns(library: Path, tmp_path: Path) -> None:
    run_alone(_fills, library, tmp_path)


# -- all of it --------------------------------------------------------------------------------------------------


class Model(torch.nn.Module):
    def __init__(self, value: float) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(on_device(value, 50_000))
        self.register_buffer("seen", on_device(value, 10))
        self.optimizer = torch.optim.SGD([self.weight], lr=1.0, foreach=False)

    def update(self) -> None:
        """Counts in each tensor, as an update and a forward pass would."""
        self.seen.add_(torch.tensor(1.0))
        self.weight.grad = on_device(-1.0, 50_000)
        self.optimizer.step()

    @property
    def state(self) -> dict[str, object]:
        return {"model": self, "optimizer": self.optimizer}


def _saves(device: Device, root: Path, memory: Path, overlap: bool) -> None:
    device.set_delay(500)
    model = Model(0.0)
    settings: dict[str, Any] = {"snapshot_every": 1, "overlap": overlap, "persist_every": 10**6, "strict": True}
    ckpt = rekindle.Checkpointer(root, model.state, memory=memory, **settings)
    ckpt.restore()
    wait_for_memory(ckpt)
    job = JobDir.of(root, memory_base(memory))
    for step in range(1, 6):
        model.update()
        ckpt.step(step)
        model.update()  # the host is ahead
        ckpt._saver.conclude()
        found = load_file(snapshot_of(job, step).with_suffix(".safetensors"))
        for name in ("model.weight", "model.seen"):
            assert (found[name] == 2 * step - 1).all(), (name, step, found[name].unique())
    model.update()
    ckpt.save(6, wait="memory")
    ckpt.close()
    twin = Model(-1.0)
    again = rekindle.Checkpointer(root, twin.state, memory=memory, persist_every=10**6)
    assert again.restore() == 6
    for one, other in ((twin.weight, model.weight), (twin.seen, model.seen)):
        assert torch.equal(one.detach().cpu(), other.detach().cpu())
    again.close()


@pytest.mark.parametrize("overlap", [False, True])
def test_snapshots_of_the_device_hold_their_step(
    library: Path, tmp_path: Path, root: Path, memory: Path, overlap: bool
) -> None:
    """None of its memory can be page-locked: all of it goes by way of page-locked buffers."""
    run_alone(_saves, library, tmp_path, root, memory, overlap)


def _is_cleared(device: Device, root: Path, memory: Path) -> None:
    calls: list[tuple[str, torch.device]] = []

    def stop(one: torch.device) -> None:
        calls.append(("stop", one))
        device.release()

    rekindle.devices.register(
        NAME,
        stop=stop,
        clean=lambda one: calls.append(("clean", one)),
        restore=lambda one: calls.append(("restore", one)),
    )
    model = Model(0.0)
    ckpt = rekindle.Checkpointer(root, model.state, memory=memory, snapshot_every=10**9, persist_every=10**9)
    ckpt.restore()
    try:
        with ckpt.guard(watchdog=False):
            for step in range(1, 4):
                model.update()
                ckpt.step(step)
            synchronize([model.weight])
            device.jam()
            raise RuntimeError("a fault on purpose")
    except RuntimeError as error:
        assert str(error) == "a fault on purpose"
    assert [name for name, _ in calls] == ["stop", "clean", "restore"]
    assert {one.type for _, one in calls} == {NAME}
    twin = Model(-1.0)
    again = rekindle.Checkpointer(root, twin.state, memory=memory, persist_every=10**9)
    assert again.restore() == 3, "no snapshot was taken before the fault"
    assert torch.equal(twin.weight.detach().cpu(), torch.full((50_000,), 3.0))
    again.close()


def test_a_device_that_can_not_be_read_is_cleared_as_its_vendor_says(
    library: Path, tmp_path: Path, root: Path, memory: Path
) -> None:
    run_alone(_is_cleared, library, tmp_path, root, memory)
