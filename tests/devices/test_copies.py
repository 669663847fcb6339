"""Copies from a device beside training: a few ahead, and never in the way of its launches."""

from __future__ import annotations

import gc
import mmap
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import rekindle
from rekindle.devices import bounce, events, table
from rekindle.devices.batches import AHEAD, DEVICE_BATCH
from rekindle.devices.events import Event, record
from rekindle.devices.page_lock import PageLocker
from rekindle.devices.streams import SideStreams, copy_now
from rekindle.errors import RekindleError
from rekindle.format.layout import BLOCK, Chunk, Layout
from rekindle.memory.job_dir import JobDir, memory_base
from rekindle.save import copy as copy_module
from rekindle.save import device_copies, plan
from rekindle.save.copy import ShardWriter, _target
from rekindle.save.device_copies import DeviceCopies
from rekindle.save.plan import Batch, CopyPlan, Piece, batches
from rekindle.state.parts import dtype_name
from tests.devices.fake import DEVICE, KIND, FakeBackend
from tests.devices.test_snapshots import check, train_and_check
from tests.devices.training import Training
from tests.faults.harness import wait_for
from tests.save.overlapped import snapshot_of, wait_for_memory

SOON = 20.0
"""Seconds in which what doesn't wait for the device is done, however busy the machine."""


def checkpointer(root: Path, training: Training, **settings: Any) -> Any:
    settings = {"snapshot_every": 1, "overlap": True, "persist_every": 10**6, "strict": True} | settings
    ckpt = rekindle.Checkpointer(root, training.state, **settings)
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


def bounce_copies(places: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    bounce.copy_by_bounce(DEVICE, partial(copy_now, DEVICE), places, sources)


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


def test_a_buffer_is_used_again_once_a_device_that_was_stuck_has_filled_it(
    device: FakeBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until then the device may write to it at any time."""
    monkeypatch.setattr(events, "STUCK", 0.0)
    monkeypatch.setattr(events, "_CHECK", 0.01)
    source, place = torch.ones(4), torch.zeros(4)
    device.own(source)
    release = device.stick()
    for _ in range(bounce._BUFFERS):
        with pytest.raises(RekindleError, match="a device has not copied its part"):
            bounce_copies([place], [source])
    with pytest.raises(RekindleError, match="other copies from the device have not ended"):
        bounce_copies([place], [source])
    monkeypatch.setattr(events, "STUCK", SOON)
    release.set()
    bounce_copies([place], [source])
    assert torch.equal(place, source)


def test_copies_that_fail_use_up_no_buffers(device: FakeBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as for want of the device's memory, which it takes to put a tensor in order."""
    monkeypatch.setattr(events, "STUCK", 0.0)
    source, place = torch.ones(4), torch.zeros(4)
    device.own(source)

    def fail(to: object, source: object) -> None:
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(device, "copy", fail)
        for _ in range(2 * bounce._BUFFERS):
            with pytest.raises(RuntimeError, match="out of memory"):
                bounce_copies([place], [source])
    monkeypatch.setattr(events, "STUCK", SOON)
    bounce_copies([place], [source])
    assert torch.equal(place, source)


def test_a_buffer_is_filled_while_the_one_before_is_emptied(
    device: FakeBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The largest batch is several loads."""
    source = torch.zeros(DEVICE_BATCH + BLOCK, dtype=torch.uint8)
    device.own(source)
    under_way, empty = [], bounce._Load.empty

    def count(load: Any) -> None:
        under_way.append(device.under_way)
        empty(load)

    monkeypatch.setattr(bounce._Load, "empty", count)
    release = device.stick()
    places = [torch.empty_like(source)]
    copies = run(lambda: (device.enter(DEVICE), bounce_copies(places, [source])))
    wait_for(lambda: under_way, what="a buffer to be waited for")
    release.set()
    copies.join(SOON)
    assert not copies.is_alive() and under_way[0] == 2


def test_a_copy_into_two_locked_ranges_is_cut_where_they_meet(device: FakeBackend) -> None:
    """CUDA refuses a copy into both."""
    source, rows = torch.arange(8192.0), torch.arange(8192.0).view(64, 128).t()
    device.own(source, rows)
    flat, strided = batches_of(source), batches_of(rows)
    mapping = mmap.mmap(-1, 1 << 16)
    first, second = PageLocker().lock(mapping, 0, 1 << 14), PageLocker().lock(mapping, 1 << 14, 1 << 16)
    assert first is not None and second is not None
    plan = CopyPlan(Layout.build([]), None, [], flat, {}, {})
    target = _target(plan, mapping)
    assert target.direct == {flat[0].start}
    places, sources = target.sides_of(flat[0])
    assert len(places) == 2 and all(device._is_locked(place.data_ptr(), place.nbytes) for place in places)
    device.copy(places, sources)
    device.settle()
    base = len(plan.layout.header)
    assert mapping[base : base + source.nbytes] == source.numpy().tobytes()
    assert not _target(CopyPlan(Layout.build([]), None, [], strided, {}, {}), mapping).direct, "torch copies the whole"
    del first
    assert not _target(plan, mapping).direct


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

    DeviceCopies(every, copy, 0.0, None).queue_ahead()
    assert len(copied) == AHEAD
    copied.clear()
    spread = DeviceCopies(every, copy, 1e6, None)
    spread.queue_ahead()
    assert len(copied) == 1, "the next is due hours later"
    waits = run(lambda: (device.enter(DEVICE), spread.await_queued(every[7])))
    spread.queue_all()
    waits.join(SOON)
    assert not waits.is_alive() and copied == every


def test_the_last_copies_are_due_when_four_fifths_of_the_time_are_over(
    device: FakeBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [1000.0]
    monkeypatch.setattr(device_copies, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(plan, "DEVICE_BATCH", 1)
    sources = [torch.zeros(10) for _ in range(20)]
    device.own(*sources)
    copied: list[Batch] = []
    copies = DeviceCopies(batches_of(*sources), lambda batch: copied.append(batch) or record(DEVICE), 100.0, None)  # type: ignore[func-returns-value]
    for passed, number, due in [(0.0, 0, 1), (3.9, 0, 1), (4.0, 0, 2), (39.9, 8, 10), (40.0, 8, 11), (76.0, 18, 20)]:
        now[0] = 1000.0 + passed
        copies.queue_ahead(number)
        assert len(copied) == due, passed


def test_copies_are_spread_by_the_time_from_a_snapshot_to_the_update_after_it(
    device: FakeBackend, root: Path, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr(copy_module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    training = Training(device)
    ckpt = checkpointer(root, training)
    wait_for_memory(ckpt)
    found = []
    for step in range(1, 4):
        training.update()
        now[0] += 50.0
        ckpt.save(step, wait="memory") if step == 1 else ckpt.step(step)
        found.append(ckpt._saver.memory.pending.copying._copies._window)
        now[0] += 7.0 * step
        ckpt._saver.memory.pending.wait_before_update()
        now[0] += 1000.0
        ckpt._saver.memory.pending.wait_before_update()  # of the second of two optimizers
    assert found[1:] == [7.0, 14.0]
    ckpt._saver.conclude()
    ckpt.close()


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


# -- which device ------------------------------------------------------------------------------------------------


def test_memory_is_locked_for_the_device_of_the_state(
    device: FakeBackend, root: Path, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Training's thread may never have chosen its device: then the first one is its current one."""
    entered, enter = set(), device.enter
    monkeypatch.setattr(device, "current_device", lambda: torch.device(KIND, 5))
    monkeypatch.setattr(device, "enter", lambda on: entered.add(on) or enter(on))
    training = Training(device)
    ckpt = checkpointer(root, training)
    training.update()
    ckpt.save(1, wait="durable")
    ckpt.close()
    again = checkpointer(root, Training(device))
    again.close()
    assert entered == {DEVICE}


def test_a_failed_lock_is_told_of_once(device: FakeBackend, caplog: pytest.LogCaptureFixture) -> None:
    device.fail_register = 1
    locker = PageLocker()
    assert not any(locker.lock(mmap.mmap(-1, 1 << 14)) for _ in range(3))
    assert (
        caplog.text.count("can't be page-locked (CUDA error 1): training goes on") == 1 and "ulimit -l" in caplog.text
    )


@pytest.mark.parametrize("overlap", [True, False])
def test_a_device_without_queues_is_copied_by_a_host_that_waits(
    device: FakeBackend, root: Path, memory: Path, overlap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch copies from it, and returns when that is done."""
    monkeypatch.delitem(table._backends, KIND)
    assert table.backend_of(DEVICE) is None

    def launch(kernel: Callable[[], object], *written: torch.Tensor) -> None:
        torch.autograd.graph.increment_version(written)
        kernel()

    monkeypatch.setattr(device, "launch", launch)
    training = Training(device, layers=3)
    ckpt = checkpointer(root, training, overlap=overlap)
    wait_for_memory(ckpt)
    train_and_check(ckpt, training, JobDir.of(root, memory_base(memory)), 4)
    again = Training(device, layers=3)
    ckpt.close()
    ckpt = checkpointer(root, again, overlap=overlap)
    assert torch.equal(again.model.weight, training.model.weight)
    ckpt.close()
    assert not device.registered and not device.under_way


# -- memory that goes away --------------------------------------------------------------------------------------


def test_what_was_freed_before_its_copy_is_not_read(device: FakeBackend) -> None:
    source = torch.ones(1000)
    device.own(source)
    every = batches_of(source)
    source.untyped_storage().resize_(0)
    copied: list[Any] = []
    copies = DeviceCopies(every, copied.append, 0.0, None)  # type: ignore[arg-type]
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
