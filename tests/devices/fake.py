"""A kind of device that lies in wait: threads work off its queues late, and what CUDA forbids is caught.

Tensors of the CPU that are listed with ``own`` are "on" the device. Whoever reads them past its queues reads what they
were before, as on a real device: the work that changes them has not been done yet.
"""

from __future__ import annotations

import ctypes
import gc
import queue
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

import torch

from rekindle.devices import bounce, events, page_lock, table
from rekindle.devices.accelerator import as_integers
from rekindle.devices.backend import Backend, QueueEvent, Stream

_collecting: list[bool] = []
"""Not empty while Python's collector is at work."""


def _note_collection(phase: str, info: dict[str, int]) -> None:
    _collecting[:] = [True] if phase == "start" else []


gc.callbacks.append(_note_collection)

KIND = "privateuseone"
DEVICE = torch.device(KIND, 0)


class FakeEvent:
    def __init__(self, backend: FakeBackend) -> None:
        self._backend = backend
        self.flag = threading.Event()

    def __del__(self) -> None:
        # Those that go between a fault and the notice of it are nobody's to keep. Python's collector calls this for
        # those too that the product keeps.
        if events._kept is not None and not _collecting:
            self._backend.needs_idle_device("an event is destroyed")

    def query(self) -> bool:
        self._backend.check_call()
        if self._backend.capture is not None and not self._backend.relaxed():
            self._backend.capture.broken = True
            raise RuntimeError("operation not permitted when a stream is capturing")
        return self.flag.is_set()


class FakeTimedEvent(FakeEvent):
    """Event that notes when the device comes to it."""

    at = 0.0

    def elapsed_time(self, end: FakeTimedEvent) -> float:
        if not (self.query() and end.query()):
            raise RuntimeError("both events must be completed before their times are told")
        return (end.at - self.at) * 1e3


class FakeStream:
    """A thread that does in order what is queued, each piece after a delay."""

    def __init__(self, backend: FakeBackend) -> None:
        self._backend = backend
        self._delay = random.Random(backend.random.random())
        self._todo: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="fake-device", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while (work := self._todo.get()) is not None:
            if self._backend.slowness:
                time.sleep(self._delay.uniform(0, self._backend.slowness))
            try:
                work()
            except Exception as error:  # as on a real device: whoever asks next is told
                self._backend.lost = f"{type(error).__name__}: {error}"

    def queue(self, work: Callable[[], None]) -> None:
        self._todo.put(work)

    def record_event(self, event: FakeEvent | None = None) -> FakeEvent:
        self._backend.check_call()
        event = event or FakeEvent(self._backend)
        event.flag = self.mark()
        return event

    def mark(self) -> threading.Event:
        """Returns what is set once all has been done that is queued."""
        flag = threading.Event()
        self.queue(flag.set)
        return flag

    def wait_event(self, event: FakeEvent) -> None:
        self._backend.check_call()
        flag = event.flag  # the point that the event stands for now
        self.queue(lambda: self._backend.wait_on_device(flag))

    def synchronize(self) -> None:
        self._backend.check_call()
        self._backend.wait_on_host(self.mark())

    def end(self) -> None:
        self._todo.put(None)


class Capture:
    """A graph that is being captured."""

    def __init__(self, thread: int) -> None:
        self.thread, self.broken = thread, False


_FEW = 4 << 10
"""Bytes of looks and of counters, which take a device no time."""


class FakeBackend(Backend):
    """One device. ``seed`` and ``slowness`` (seconds at most) decide on the delay before each piece of work."""

    def __init__(self, seed: int = 0, slowness: float = 0.002) -> None:
        super().__init__(KIND)
        self.random, self.slowness = random.Random(seed), slowness
        self.lost = ""
        """Why the device does no more, as after a failed assertion in a kernel."""
        self.capture: Capture | None = None
        self.registered: dict[int, int] = {}
        """Bytes of page-locked memory by address."""
        self.copying = 0.0
        """Seconds that a copy takes, besides, but for those of a few bytes."""
        self.tells_times = True
        """False for a device without events that tell times."""
        self.node: int | None = None
        """NUMA node that the device is nearest to."""
        self.fail_register = 0
        """Number of the error that page-locking ends with; 0 for none."""
        self.faulty = False
        """True from a fault on: whatever may then wait for a lock, or for an idle device, is complained of."""
        self.jam = threading.Event()
        """Unset while a thread stands in a call and holds the driver's lock, for which all copies wait."""
        self.jam.set()
        self._kernels: set[torch.dtype] = set()
        """Types for which the kernel that puts strided elements in order is loaded."""
        self.complaints: list[str] = []
        """Calls that corrupt memory, or open a second device, on a real one."""
        self._owned: list[tuple[int, int, torch.UntypedStorage]] = []
        self._copies: dict[tuple[int, int], int] = {}
        self._kept: list[tuple[int, threading.Event]] = []
        """Addresses of memory that is not given to others before a stream has come to a point."""
        self._context = threading.RLock()
        """Held by who queues a kernel, and as long as a copy into memory that is not page-locked takes."""
        self._streams: list[FakeStream] = []
        self._local = threading.local()
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self.default = self._make_stream()
        self.enter(DEVICE)

    def _make_stream(self) -> FakeStream:
        stream = FakeStream(self)
        self._streams.append(stream)
        return stream

    # -- what a test does ---------------------------------------------------------------------------------------

    def own(self, *tensors: torch.Tensor) -> None:
        """Puts tensors on the device."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            self._owned.append((storage.data_ptr(), storage.data_ptr() + storage.nbytes(), storage))

    def device_of(self, tensor: torch.Tensor) -> torch.device:
        if tensor.device.type != "cpu" or not tensor.numel():
            return tensor.device
        at = tensor.data_ptr()
        return DEVICE if any(start <= at < stop for start, stop, _ in list(self._owned)) else tensor.device

    def launch(self, kernel: Callable[[], object], *written: torch.Tensor) -> None:
        """Queues ``kernel``, which writes to the ``data`` of tensors; their versions are counted now, as by torch."""
        self.check_call()
        error, self._local.error = getattr(self._local, "error", ""), ""
        if error:
            raise RuntimeError(f"kernel launch failed: {error}, from an earlier call")
        for tensor in written:
            torch.autograd.graph.increment_version(tensor)
        with self._context:
            self.current_stream(DEVICE).queue(lambda: void(kernel()))

    def free(self, tensor: torch.Tensor) -> None:
        """Gives a tensor's memory to somebody else, who queues a kernel that fills it."""
        at, freed = tensor.data_ptr(), tensor.data
        kept = [flag for address, flag in self._kept if address == at]

        def reuse() -> None:
            for flag in kept:
                self.wait_on_device(flag)
            freed.fill_(float("nan"))

        self.current_stream(DEVICE).queue(reuse)

    @property
    def under_way(self) -> int:
        """Number of copies that are queued, and have not ended."""
        with self._lock:
            return sum(self._copies.values())

    def stick(self) -> threading.Event:
        """Queues work that only ends once the event is set, as a collective whose peer has died."""
        release = threading.Event()
        self.current_stream(DEVICE).queue(lambda: self.wait_on_device(release))
        return release

    @contextmanager
    def capturing_graph(self) -> Iterator[Capture]:
        self.capture = capture = Capture(threading.get_ident())
        try:
            yield capture
        finally:
            self.capture = None

    def settle(self) -> None:
        """Waits until all streams have done their work."""
        for stream in list(self._streams):
            stream.synchronize()

    def unstick(self) -> None:
        """Ends all that waits on the device."""
        self._stop.set()

    def close(self) -> None:
        self.unstick()
        for stream in self._streams:
            stream.end()

    # -- what streams and events ask ----------------------------------------------------------------------------

    def wait_on_device(self, flag: threading.Event) -> None:
        while not flag.wait(0.05):
            if self._stop.is_set():
                return

    def wait_on_host(self, flag: threading.Event) -> None:
        self.wait_on_device(flag)

    def check_call(self) -> None:
        """Notes a thread that has not set its device; raises what the device has died of."""
        if not getattr(self._local, "entered", False):
            self.complain("a thread that has not set its device opens another one")
        if self.lost:
            raise RuntimeError(f"device-side assert triggered: {self.lost}")

    def complain(self, what: str) -> None:
        self.complaints.append(f"{threading.current_thread().name}: {what}")

    def needs_idle_device(self, what: str) -> None:
        if self.faulty and not self._stop.is_set():
            self.complain(f"{what} beside a device that may be stuck")

    def relaxed(self) -> bool:
        return self.capture is not None and (
            getattr(self._local, "entered", False) and threading.get_ident() != self.capture.thread
        )

    # -- the contract -------------------------------------------------------------------------------------------

    def in_use(self) -> bool:
        return True

    def available(self) -> bool:
        return True

    def enter(self, device: torch.device) -> None:
        self._local.entered = True

    def current_device(self) -> torch.device:
        return DEVICE

    def numa_node(self, device: torch.device) -> int | None:
        return self.node

    def current_stream(self, device: torch.device) -> FakeStream:
        stack = getattr(self._local, "stack", None)
        return stack[-1] if stack else self.default

    def new_stream(self, device: torch.device) -> Stream:
        self.check_call()
        self.needs_idle_device("a stream is made")
        return self._make_stream()

    def record_timed_event(self, device: torch.device) -> FakeTimedEvent:
        if not self.tells_times:
            raise RuntimeError("this kind of device tells no times")
        event = FakeTimedEvent(self)
        stream = self.current_stream(device)
        stream.queue(lambda: setattr(event, "at", time.monotonic()))
        stream.record_event(event)
        return event

    def on(self, stream: Stream) -> AbstractContextManager[object]:
        return self._on(stream)

    @contextmanager
    def _on(self, stream: Stream) -> Iterator[None]:
        assert isinstance(stream, FakeStream)
        stack = self._local.__dict__.setdefault("stack", [])
        stack.append(stream)
        try:
            yield
        finally:
            stack.pop()

    def copy(self, to: Sequence[torch.Tensor], source: Sequence[torch.Tensor]) -> None:
        """Copies late into page-locked memory; makes the caller wait for a copy from or to any other, as CUDA does."""
        self.check_call()
        self.wait_on_device(self.jam)
        stream = self.current_stream(DEVICE)
        locked = True
        for one, other in zip(to, source, strict=True):
            if not other.is_contiguous() and other.dtype not in self._kernels:
                self.needs_idle_device(f"a kernel for {other.dtype} is loaded")
                self._kernels.add(other.dtype)
            host = other if self.device_of(other).type == "cpu" else one
            at, nbytes = host.data_ptr(), host.nbytes
            locked &= self._is_locked(at, nbytes)
            with self._lock:
                self._copies[at, nbytes] = self._copies.get((at, nbytes), 0) + 1
            stream.queue(lambda one=one, other=other, key=(at, nbytes): self._copy(one, other, key))  # type: ignore[misc]
        if not locked:
            with self._context:
                stream.synchronize()

    def _copy(self, to: torch.Tensor, source: torch.Tensor, key: tuple[int, int]) -> None:
        if self.copying and source.nbytes > _FEW:
            time.sleep(self.copying)
        with torch.no_grad():
            to.data.copy_(source.data)
        with self._lock:
            self._copies[key] -= 1
            if not self._copies[key]:
                del self._copies[key]

    def gather(self, to: torch.Tensor, parts: Sequence[torch.Tensor]) -> None:
        self._require_device(to, *parts)
        self.launch(lambda: torch.cat([part.data for part in parts], out=to.data))

    def add_up(self, to: Sequence[torch.Tensor], parts: Sequence[torch.Tensor]) -> None:
        self._require_device(*to, *parts)
        for one, part in zip(to, parts, strict=True):
            self.launch(
                lambda one=one, part=part: torch.sum(as_integers(part.data), 0, dtype=torch.int64, out=one.data)
            )  # type: ignore[misc]

    def _require_device(self, *tensors: torch.Tensor) -> None:
        if any(self.device_of(tensor) != DEVICE for tensor in tensors):
            self.complain("a kernel is given memory of the host")

    def keep(self, source: torch.Tensor, stream: Stream) -> None:
        assert isinstance(stream, FakeStream)
        self._kept.append((source.data_ptr(), stream.mark()))

    def _is_locked(self, at: int, nbytes: int) -> bool:
        return any(start <= at and at + nbytes <= start + length for start, length in list(self.registered.items()))

    def synchronize(self, device: torch.device) -> None:
        self.check_call()
        self.settle()

    def capturing(self) -> bool:
        return self.capture is not None and self.capture.thread == threading.get_ident()

    def allocate(self, device: torch.device, nbytes: int) -> torch.Tensor:
        self.check_call()
        self.needs_idle_device("memory of the device is allocated")
        tensor = torch.zeros(nbytes, dtype=torch.uint8)
        self.own(tensor)
        return tensor

    def pinned(self, nbytes: int) -> torch.Tensor:
        self.needs_idle_device("page-locked memory is allocated")
        tensor = torch.empty(nbytes, dtype=torch.uint8)
        if nbytes:
            self.registered[tensor.data_ptr()] = nbytes
        return tensor

    def register(self, address: int, nbytes: int) -> bool:
        self.check_call()
        self.needs_idle_device("memory is page-locked")
        if self.fail_register:
            self._local.error = f"error {self.fail_register}"
            raise OSError(f"CUDA error {self.fail_register}")
        ctypes.string_at(address, 1)  # ends the process if there is no memory
        self.registered[address] = nbytes
        return True

    def unregister(self, address: int) -> None:
        self.needs_idle_device("memory is unlocked")
        nbytes = self.registered.pop(address)
        with self._lock:
            if any(address < at + length and at < address + nbytes for at, length in self._copies):
                self.complain("memory is unlocked while a copy into it is under way")

    def rng_states(self) -> list[torch.Tensor]:
        return []

    def set_rng_states(self, states: Sequence[torch.Tensor]) -> None:
        return None


def void(_: object) -> None:
    return None


def install(monkeypatch: object, backend: FakeBackend) -> None:
    """Makes the device one of this process's, until the test's end."""
    monkeypatch.setitem(table._backends, KIND, backend)  # type: ignore[attr-defined]
    monkeypatch.setattr(table, "_device", backend.device_of)  # type: ignore[attr-defined]
    monkeypatch.setattr(events, "_kept", None)  # type: ignore[attr-defined]
    monkeypatch.setattr(page_lock, "_warned", False)  # type: ignore[attr-defined]
    monkeypatch.setattr(events._watches, "_made", {})  # type: ignore[attr-defined]
    for rings in (bounce._rings, bounce._rescue_rings):
        monkeypatch.setattr(rings, "_made", {})  # type: ignore[attr-defined]


__all__ = ["DEVICE", "Capture", "FakeBackend", "FakeEvent", "FakeStream", "QueueEvent", "install"]
