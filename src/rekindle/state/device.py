"""Copies from CUDA devices: page-locked memory, side streams, and the events that keep both in order.

A copy behind the training's back starts once the device has done what was queued when ``ckpt.step(n)`` was called, and
the stream that trains waits for it, on the device, before the next update. The host waits for neither. ROCm builds of
torch speak of CUDA too. Tensors of other devices are copied by the calling thread, which waits.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager

import torch

__all__ = ["Event", "SideStreams", "resume_after", "record_event", "page_lock", "wait_for_event"]

log = logging.getLogger("rekindle")

_PORTABLE = 1
"""cudaHostRegisterPortable: page-locked for every device of this process."""
_POLL = 1e-4

Event = torch.cuda.Event


class SideStreams:
    """One side stream for each CUDA device in use. ``here`` and ``hold`` belong to the thread that trains."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._last: dict[torch.device, Event] = {}
        """What the next update has to wait for."""

    def here(self, device: torch.device, to: Sequence[torch.Tensor], source: Sequence[torch.Tensor]) -> Event | None:
        """Copy in the order of the caller's stream. The event tells when it is done; None means that it is."""
        with torch.no_grad():
            torch._foreach_copy_(list(to), list(source), non_blocking=device.type == "cuda")
        if device.type != "cuda":
            return None
        event: Event = torch.cuda.current_stream(device).record_event()
        return event

    def start(self, devices: Collection[torch.device]) -> None:
        """Let the side streams go on from where the caller's streams are now."""
        self._last.clear()
        for device in devices:
            stream = self._streams.get(device)
            if stream is None:
                stream = self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            stream.wait_stream(torch.cuda.current_stream(device))

    def aside(self, device: torch.device, to: Sequence[torch.Tensor], source: Sequence[torch.Tensor]) -> Event:
        """Copy on the side stream. Any thread."""
        with torch.no_grad(), torch.cuda.stream(self._streams[device]):
            torch._foreach_copy_(list(to), list(source), non_blocking=True)
            event: Event = self._streams[device].record_event()
        self._last[device] = event
        return event

    def hold(self) -> None:
        """Let the caller's streams wait, on the device, for all that ``aside`` has queued."""
        for device, event in self._last.items():
            torch.cuda.current_stream(device).wait_event(event)
        self._last.clear()


def record_event(device: torch.device) -> Event:
    """What tells that the device has done all that the caller's stream was given so far."""
    event: Event = torch.cuda.current_stream(device).record_event()
    return event


@contextmanager
def resume_after(events: Mapping[torch.device, Event]) -> Iterator[None]:
    """Work as if the caller's streams were at these events, though what was queued later may never end."""
    with ExitStack() as streams:
        for device, event in events.items():
            stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            stream.wait_event(event)
            streams.enter_context(torch.cuda.stream(stream))
        yield


def wait_for_event(event: Event | None, timeout: float) -> bool:
    """Wait until the device has come to ``event``. False after ``timeout`` seconds. Other threads run meanwhile."""
    deadline = time.monotonic() + timeout
    while event is not None and not event.query():  # type: ignore[no-untyped-call]
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL)
    return True


class _PageLock:
    """Memory that is page-locked until this is dropped."""

    def __init__(self, mapping: mmap.mmap) -> None:
        self._anchor = ctypes.c_char.from_buffer(mapping)
        self._address = ctypes.addressof(self._anchor)
        result = int(torch.cuda.cudart().cudaHostRegister(self._address, len(mapping), _PORTABLE))  # type: ignore[no-untyped-call]
        if result:
            self._address = 0
            raise OSError(f"CUDA error {result}")

    def __del__(self) -> None:
        if self._address:
            torch.cuda.cudart().cudaHostUnregister(self._address)  # type: ignore[no-untyped-call]


def page_lock(mapping: mmap.mmap) -> object:
    """Page-lock ``mapping``, so that CUDA devices copy into it at the speed of the bus, until the result is dropped.

    None where no device is in use, and, with a warning, where it is refused.
    """
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return None
    try:
        return _PageLock(mapping)
    except (OSError, RuntimeError) as error:
        log.warning(
            "a snapshot's memory can't be page-locked (%s; is 'ulimit -l' too low?): copies from the device are slower "
            "and training waits for more of them",
            error,
        )
        return None
