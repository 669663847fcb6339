"""Copies from a device beside training: a few ahead, and never in the way of its launches."""

from __future__ import annotations

import gc
import mmap
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import rekindle
from rekindle.devices import bounce
from rekindle.devices.batches import AHEAD
from rekindle.devices.events import Event, record
from rekindle.devices.page_lock import PageLocker
from rekindle.devices.streams import SideStreams, copy_now
from rekindle.errors import RekindleError
from rekindle.format.layout import BLOCK, Chunk, Layout
from rekindle.memory.job_dir import JobDir, memory_base
from rekindle.save import plan
from rekindle.save.copy import ShardWriter, _target
from rekindle.save.device_copies import DeviceCopies
from rekindle.save.plan import Batch, CopyPlan, Piece, batches
from rekindle.state.parts import dtype_name
from tests.devices.fake import DEVICE, FakeBackend
from tests.devices.test_snapshots import check, train_and_check
from tests.devices.training import Training
from tests.faults.harness import wait_for
from tests.save.overlapped import snapshot_of, wait_for_memory

SOON = 20.0
"""Seconds in which what doesn't wait for the device is done, however busy the machine."""


def checkpointer(root: Path, training: Training, **settings: Any) -> Any:
    ckpt = rekindle.Checkpointer(
        root, training.state, overlap=True, persist_every=10**6, **({"strict": True} | settings)
    )
    ckpt.restore()
    return ckpt


def batches_of(*sources: torch.Tensor) -> list[Batch]:
    """The batches in which tensors of one dimension are copied late."""
    named = {f"x{number:02d}": source for number, source in enumerate(sources)}
    layout = Layout.build(Chunk(name, dtype_name(x), x.shape, (0,), x.shape, 0) for name, x in named.items())
    pieces = {(c.name, c.offsets): Piece(c, named[c.name], named[c.name], True, ()) for c in layout.chunks}
    return batches(layout, pieces)[1]


def run(work: Any) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def launch_waits(device: FakeBackend) -> bool:
    """True if no kernel can be launched while a copy is under way."""
    wait_for(lambda: device.under_way, what="a copy to be queued")
    launches = run(lambda: (device.enter(DEVICE), device.launch(lambda: None)))
    launches.join(SOON)
    return launches.is_alive()


def step_on_stuck_device(device: FakeBackend, ckpt: Any, training: Training) -> threading.Event:
    """Takes the second snapshot, whose memory is there. The device copies once the result is set."""
    training.update()
    ckpt.save(1, wait="memory")
    training.update()
    release = device.stick()
    ckpt.step(2)
    return release


def bounce_copies(
    places: list[torch.Tensor], sources: list[torch.Tensor], wait: Any = lambda event: event.wait(SOON)
) -> None:
    bounce.copy_by_bounce(DEVICE, lambda to, source: copy_now(DEVICE, to, source), places, sources, wait)


# -- into memory that is not page-locked ------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
def test_snapshots_in_memory_that_cannot_be_locked(device: FakeBackend, root: Path, memory: Path, seed: int) -> None:
    device.fail_register = 1
    training = Training(device, layers=3)
    ckpt = checkpointer(root, training)
    train_and_check(ckpt, training, JobDir.of(root, memory_base(memory)), 5)
    ckpt.close()


def test_kernels_are_launched_while_a_device_copies_into_such_memory(
    device: FakeBackend, root: Path, memory: Path
) -> None:
    """A copy straight into it would hold the lock that each launch takes."""
    device.fail_register = 1
    training = Training(device, buffer=False)
    ckpt = checkpointer(root, training)
    release = step_on_stuck_device(device, ckpt, training)
    waited = launch_waits(device)
    release.set()
    ckpt._saver.conclude()
    ckpt.close()
    assert not waited


def test_kernels_are_launched_during_a_save_without_memory_store(device: FakeBackend, root: Path) -> None:
    training = Training(device, buffer=False)
    ckpt = checkpointer(root, training, memory_limit=1, strict=False)
    training.update()
    ckpt.save(1, wait="durable")
    training.update()
    release = device.stick()
    saves = run(lambda: (device.enter(DEVICE), ckpt.save(2, wait="durable")))
    waited = launch_waits(device)
    release.set()
    saves.join(SOON)
    ckpt.close()
    assert not waited and not saves.is_alive() and ckpt.metrics.failed == 0


SOURCES = {
    "small": lambda: torch.arange(10.0),
    "several buffers": lambda: torch.arange(5000.0),
    "rows": lambda: torch.arange(6000.0).view(60, 100),
    "not in order": lambda: torch.arange(6000.0).view(100, 60).t(),
    "rows larger than a buffer": lambda: torch.arange(12000.0).view(2, 2, 3000).transpose(0, 1),
    "conjugated": lambda: torch.arange(3000.0).to(torch.complex64).mul(1j).conj(),
    "empty": lambda: torch.empty(0),
    "a number": lambda: torch.tensor(3.0),
}


@pytest.mark.parametrize("kind", SOURCES)
def test_what_bounces_arrives(device: FakeBackend, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.setattr(bounce, "_BYTES", 4096)
    sources = [SOURCES[kind](), torch.ones(7, dtype=torch.int8), SOURCES[kind]()]
    device.own(*sources)
    places = [torch.empty(s.shape, dtype=s.dtype) for s in sources]
    bounce_copies(places, sources)
    for place, source in zip(places, sources, strict=True):
        assert torch.equal(place, source.resolve_conj())


def test_more_threads_than_buffers_bounce_at_once(device: FakeBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounce, "_BYTES", 4096)
    made = []
    pinned = device.pinned
    monkeypatch.setattr(device, "pinned", lambda nbytes: made.append(nbytes) or pinned(nbytes))
    sources = [torch.full((9000,), float(number)) for number in range(12)]
    device.own(*sources)
    places = [torch.empty(9000) for _ in sources]

    def copy(number: int) -> None:
        device.enter(DEVICE)
        bounce_copies([places[number]], [sources[number]])

    with ThreadPoolExecutor(12) as pool:
        list(pool.map(copy, range(12)))
    assert all(torch.equal(place, source) for place, source in zip(places, sources, strict=True))
    assert len(made) <= bounce._BUFFERS


def test_a_buffer_that_a_device_may_still_write_to_is_not_used_again(device: FakeBackend) -> None:
    source, place = torch.ones(4), torch.zeros(4)
    device.own(source)

    def fail(event: Event) -> None:
        raise RekindleError("stuck")

    for _ in range(bounce._BUFFERS):
        with pytest.raises(RekindleError, match="stuck"):
            bounce_copies([place], [source], fail)
    assert bounce._ring(DEVICE)._take() is None


def test_a_place_in_two_locked_ranges_counts_as_not_locked(device: FakeBackend) -> None:
    """CUDA may refuse a copy into both."""
    source = torch.arange(8192.0)
    device.own(source)
    plan = CopyPlan(Layout.build([]), None, [], batches_of(source), {}, {})
    mapping = mmap.mmap(-1, 1 << 16)
    first = PageLocker().lock(mapping, 0, 1 << 14)
    second = PageLocker().lock(mapping, 1 << 14, 1 << 16)
    assert first is not None and second is not None
    assert not _target(plan, mapping).direct
    del first, second
    whole = PageLocker().lock(mapping)
    assert whole is not None and len(_target(plan, mapping).direct) == 1


# -- a few ahead ------------------------------------------------------------------------------------------------


def test_a_large_tensor_is_copied_in_pieces(device: FakeBackend) -> None:
    source = torch.arange((2 * BLOCK + 4000) // 4, dtype=torch.int32)
    device.own(source)
    units = [unit for batch in batches_of(source) for unit in batch.units]
    assert len(units) == 3 and max(unit.nbytes for unit in units) == BLOCK
    assert torch.equal(torch.cat([unit.part() for unit in units]), source)
    assert not any(unit.moved for unit in units)


def test_few_copies_wait_in_the_device_s_queue_until_an_update_needs_all(
    device: FakeBackend, root: Path, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan, "DEVICE_BATCH", 1)
    training = Training(device, size=10_000, layers=12)
    ckpt = checkpointer(root, training)
    wait_for_memory(ckpt)
    release = step_on_stuck_device(device, ckpt, training)
    wait_for(lambda: device.under_way, what="copies to be queued")
    pending = ckpt._saver.memory.pending
    assert not pending.wait(0.5) and device.under_way <= AHEAD + 1, "a small copy of training's waits for all of them"
    pending.wait_before_update()
    assert device.under_way > 2 * AHEAD, "now the device has to wait for all"
    release.set()
    training.update()
    ckpt._saver.conclude()
    job = JobDir.of(root, memory_base(memory))
    check(snapshot_of(job, 2).with_suffix(".safetensors"), training, 2)
    ckpt.close()


def test_copies_are_spread_over_the_time_until_the_update(device: FakeBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "DEVICE_BATCH", 1)
    sources = [torch.zeros(10) for _ in range(20)]
    device.own(*sources)
    every = batches_of(*sources)
    copied: list[Batch] = []

    def copy(batch: Batch) -> Event:
        copied.append(batch)
        return record(DEVICE)

    DeviceCopies(every, copy, 0.0).queue_ahead()
    assert len(copied) == AHEAD
    copied.clear()
    spread = DeviceCopies(every, copy, 1e6)
    spread.queue_ahead()
    assert len(copied) == 1, "the next is due hours later"
    waits = run(lambda: (device.enter(DEVICE), spread.await_queued(every[7])))
    spread.queue_all()
    waits.join(SOON)
    assert not waits.is_alive() and copied == every


def test_a_copy_keeps_nothing_alive_once_it_is_forgotten(device: FakeBackend) -> None:
    """Python's collector may come late, and the state is large."""
    device.enter(DEVICE)
    source, mapping = torch.ones(5000), mmap.mmap(-1, 1 << 16)
    device.own(source)
    layout = Layout.build([Chunk("x00", "float32", source.shape, (0,), source.shape, 0)])
    every = CopyPlan(layout, None, [], batches_of(source), {}, {})
    lock, writer = PageLocker().lock(mapping), ShardWriter()
    gc.disable()
    try:
        copying = writer.start(every, mapping, None, 1)
        copying.finish()
        gone = weakref.ref(copying)
        del copying
        assert lock is not None and gone() is None
    finally:
        gc.enable()
        writer.close()


# -- memory that goes away --------------------------------------------------------------------------------------


def test_what_was_freed_before_its_copy_is_not_read(device: FakeBackend) -> None:
    source = torch.ones(1000)
    device.own(source)
    every = batches_of(source)
    source.untyped_storage().resize_(0)
    copied: list[Any] = []
    copies = DeviceCopies(every, copied.append, 0.0)  # type: ignore[arg-type]
    with pytest.raises(RekindleError, match="freed or resized"):
        copies.queue_all()
    assert not copied


def test_what_is_freed_during_its_copy_is_not_given_away_before(device: FakeBackend) -> None:
    source, to = torch.ones(1000), device.pinned(4000).view(torch.float32)
    device.own(source)
    side = SideStreams()
    side.catch_up([DEVICE])
    release = threading.Event()
    side._streams[DEVICE].queue(lambda: device.wait_on_device(release))  # type: ignore[attr-defined]
    event = side.copy_aside(DEVICE, [to], [source])
    device.free(source)
    release.set()
    assert event.wait(SOON)
    device.settle()
    assert torch.equal(to, torch.ones(1000))


# -- graphs that are being captured -----------------------------------------------------------------------------


@pytest.mark.parametrize("locked", [True, False])
def test_copies_do_not_break_a_capture(device: FakeBackend, root: Path, memory: Path, locked: bool) -> None:
    device.fail_register = int(not locked)
    training = Training(device, layers=3, buffer=False)
    ckpt = checkpointer(root, training)
    release = step_on_stuck_device(device, ckpt, training)
    pending = ckpt._saver.memory.pending
    with device.capturing_graph() as capture:
        release.set()
        wait_for(lambda: pending.committed, what="the commit")
    assert not capture.broken
    ckpt.close()


def test_page_locking_does_not_break_a_capture(device: FakeBackend) -> None:
    mapping = mmap.mmap(-1, 1 << 16)
    with device.capturing_graph() as capture:
        lock = PageLocker().lock(mapping)
    assert lock is not None and not capture.broken
