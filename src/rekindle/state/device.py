"""Copies from CUDA devices: page-locks host memory, and orders side streams by events.

A background copy starts once the device has done what was queued when ``ckpt.step(n)`` was called. The training stream
waits for it, on the device, before the next update. The host waits for neither. ROCm builds of torch use the same API.
Tensors of other devices are copied by the calling thread, which waits.
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
"""Seconds between two looks at an event."""

Event = torch.cuda.Event


class SideStreams:
    """Copies on one side stream for each CUDA device in use.

    ``copy_now``, ``catch_up`` and ``make_training_wait`` are for the training thread.
    """

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._last: dict[torch.device, Event] = {}
        """Newest event of each side stream, for which the next update has to wait."""

    def copy_now(
        self, device: torch.device, to: Sequence[torch.Tensor], source: Sequence[torch.Tensor]
    ) -> Event | None:
        """Copies on the caller's stream. Returns the event of the copy's end; None if it has ended."""
        with torch.no_grad():
            torch._foreach_copy_(list(to), list(source), non_blocking=device.type == "cuda")
        if device.type != "cuda":
            return None
        event: Event = torch.cuda.current_stream(device).record_event()
        return event

    def catch_up(self, devices: Collection[torch.device]) -> None:
        """Makes the side streams wait, on the device, for the work queued on the caller's streams so far."""
        self._last.clear()
        for device in devices:
            stream = self._streams.get(device)
            if stream is None:
                stream = self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            stream.wait_stream(torch.cuda.current_stream(device))

    def copy_aside(self, device: torch.device, to: Sequence[torch.Tensor], source: Sequence[torch.Tensor]) -> Event:
        """Copies on the side stream and returns the event of the copy's end. May be called from any thread."""
        with torch.no_grad(), torch.cuda.stream(self._streams[device]):
            torch._foreach_copy_(list(to), list(source), non_blocking=True)
            event: Event = self._streams[device].record_event()
        self._last[device] = event
        return event

    def make_training_wait(self) -> None:
        """Makes the caller's streams wait, on the device, for all copies that ``copy_aside`` has queued."""
        for device, event in self._last.items():
            torch.cuda.current_stream(device).wait_event(event)
        self._last.clear()


def record_event(device: torch.device) -> Event:
    """Records and returns an event: the device reaches it after the work queued on the caller's stream so far."""
    event: Event = torch.cuda.current_stream(device).record_event()
    return event


@contextmanager
def resume_after(events: Mapping[torch.device, Event]) -> Iterator[None]:
    """Runs the block on streams that wait only for these events: work queued later may never end."""
    with ExitStack() as streams:
        for device, event in events.items():
            stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            stream.wait_event(event)
            streams.enter_context(torch.cuda.stream(stream))
        yield


def wait_for_event(event: Event | None, timeout: float) -> bool:
    """Waits until the device has reached ``event``. False after ``timeout`` seconds. Other threads run meanwhile."""
    deadline = time.monotonic() + timeout
    while event is not None and not event.query():  # type: ignore[no-untyped-call]
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL)
    return True


class _PageLock:
    """Keeps memory page-locked until this object is dropped."""

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
    """Page-locks ``mapping`` until the result is dropped, so that CUDA devices copy into it at the speed of the bus.

    Returns None if no device is in use, or, after a warning, if page-locking fails.
    """
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return None
    try:
        return _PageLock(mapping)
    except (OSError, RuntimeError) as error:
        log.warning(
            "a snapshot's memory can't be page-locked (%s): copies from the device are slower, and training waits "
            "longer for them: raise the limit that 'ulimit -l' shows",
            error,
        )
        return None
