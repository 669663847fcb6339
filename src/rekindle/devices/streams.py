"""Copies between devices and the host in the order of training: on its own streams, or on side streams beside them.

A background copy starts once the device has done what was queued when ``ckpt.step(n)`` was called. The training stream
waits for it, on the device, before the next update. The host waits for neither. Tensors of devices without a backend
are copied by the calling thread, which waits.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager

import torch

from rekindle.devices.backend import Stream
from rekindle.devices.events import Event, record
from rekindle.devices.page_lock import PageLocker
from rekindle.devices.table import Entrance, backend_of, device_of, require_backend

__all__ = ["SideStreams", "ThreadStreams", "copy_now", "resume_after", "synchronize"]


def copy_now(device: torch.device, to: Sequence[torch.Tensor], source: Sequence[torch.Tensor]) -> Event | None:
    """Copies on the calling thread's stream. Returns the event of the copy's end; None if it has ended."""
    backend = backend_of(device)
    if backend is None:
        with torch.no_grad():
            torch._foreach_copy_(list(to), list(source))
        return None
    backend.copy(to, source)
    return record(device)


class SideStreams:
    """Copies on one side stream for each device in use.

    ``catch_up`` and ``make_training_wait`` are for the training thread.
    """

    def __init__(self, streams: Mapping[torch.device, Stream] | None = None) -> None:
        """``streams``: those to use; others are made when a device is met."""
        self._streams: dict[torch.device, Stream] = dict(streams or {})

    def catch_up(self, devices: Collection[torch.device]) -> None:
        """Makes the side streams wait, on the device, for the work queued on the caller's streams so far."""
        for device in devices:
            if device not in self._streams:
                self._streams[device] = require_backend(device).new_stream(device)
            if self._streams[device] != require_backend(device).current_stream(device):
                self._streams[device].wait_event(record(device).raw)

    @contextmanager
    def aside(self, device: torch.device) -> Iterator[None]:
        """Queues the block's work on the side stream. For any thread that entered the device."""
        with require_backend(device).on(self._streams[device]):
            yield

    def copy_aside(self, device: torch.device, to: Sequence[torch.Tensor], source: Sequence[torch.Tensor]) -> Event:
        """Copies on the side stream and returns the event of the copy's end. For any thread that entered the device.

        Memory of ``source`` that is freed meanwhile is not given to others before that.
        """
        backend, stream = require_backend(device), self._streams[device]
        with backend.on(stream):
            backend.copy(to, source)
        for tensor in source:
            backend.keep(tensor, stream)
        return Event(device, stream.record_event())

    def make_training_wait(self, events: Iterable[Event]) -> None:
        """Makes the caller's streams wait, on the device, for copies that ``copy_aside`` has queued."""
        for event in events:
            require_backend(event.device).current_stream(event.device).wait_event(event.raw)


@contextmanager
def resume_after(events: Mapping[torch.device, Event], by: Mapping[torch.device, Stream]) -> Iterator[None]:
    """Runs the block on streams that wait only for these events: work queued later may never end.

    Devices that have a stream in ``by`` use that one, others a new one. For any thread that entered the devices.
    """
    with ExitStack() as streams:
        for device, event in events.items():
            backend = require_backend(device)
            stream = by.get(device) or backend.new_stream(device)
            stream.wait_event(event.raw)
            streams.enter_context(backend.on(stream))
        yield


class ThreadStreams:
    """Copies to devices on one stream for each thread and device, so that copies of several threads overlap."""

    def __init__(self, devices: Collection[torch.device]) -> None:
        """``devices``: those that are copied to."""
        self._local, self._entrance = threading.local(), Entrance()
        self.page_lock = PageLocker(devices).lock

    def copy(self, to: torch.Tensor, source: torch.Tensor) -> None:
        """Copies, and waits until that is done."""
        device = device_of(to)
        backend = backend_of(device)
        if backend is None:
            with torch.no_grad():
                to.copy_(source)
            return
        streams = self._local.__dict__.setdefault("streams", {})
        if device not in streams:
            self._entrance.enter([device])
            streams[device] = backend.new_stream(device)
        with backend.on(streams[device]):
            backend.copy([to], [source])
        streams[device].synchronize()


def synchronize(tensors: Iterable[torch.Tensor]) -> None:
    """Waits until devices have done what they were told, so that nothing still reads what is now written."""
    for device in {device_of(tensor) for tensor in tensors}:
        backend = backend_of(device)
        if backend is not None:
            backend.synchronize(device)
