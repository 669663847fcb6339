"""Copies from devices into memory that is not page-locked, by way of a little that is.

A device's copy into other memory makes its caller wait and, with CUDA, every thread that launches a kernel meanwhile.
Here the device copies into a ring of page-locked buffers, and the caller moves the bytes on to where they belong.
"""

from __future__ import annotations

import ctypes
import os
import queue
import threading
from collections.abc import Callable, Sequence

import torch

from rekindle.devices.backend import Backend
from rekindle.devices.batches import batched
from rekindle.devices.events import Event
from rekindle.devices.table import backend_of
from rekindle.errors import RekindleError

__all__ = ["copy_by_bounce", "prepare_bounce"]

_BYTES = 64 << 20
"""Bytes of a buffer: 1.3 ms of a bus of 50 GB/s, long enough that queueing a copy costs little beside it."""
_BUFFERS = 4
"""Buffers of a device: two are filled while two are emptied. All of them together cost 256 MiB of memory."""
_ALIGN = 64
_STUCK = 600.0
"""Seconds after which a buffer that doesn't get free counts as lost."""

Copy = Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor]], Event | None]
"""Queues copies from one device, and returns the event of their end."""


def copy_by_bounce(
    device: torch.device,
    copy: Copy,
    to: Sequence[torch.Tensor],
    source: Sequence[torch.Tensor],
    wait: Callable[[Event], object],
) -> None:
    """Copies with ``copy`` from ``device`` into host tensors without gaps. Returns when that is done.

    ``wait`` returns when an event has been reached, or raises. For any thread that entered the device.
    """
    _ring(device).copy(copy, to, source, wait)


def prepare_bounce(device: torch.device) -> None:
    """Makes the buffers, for a time when a device that is stuck would let nobody have page-locked memory."""
    _ring(device).fill()


class _Ring:
    """Page-locked buffers of one device, for all threads. Made when they are needed, and kept."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._free: queue.SimpleQueue[torch.Tensor] = queue.SimpleQueue()
        self._made, self._making = 0, threading.Lock()

    def fill(self) -> None:
        while (buffer := self._make()) is not None:
            self._free.put(buffer)

    def _make(self) -> torch.Tensor | None:
        with self._making:
            if self._made == _BUFFERS:
                return None
            buffer = self._backend.pinned(_BYTES)
            self._made += 1
            return buffer

    def _take(self) -> torch.Tensor | None:
        """Returns a buffer; None if all are in use."""
        try:
            return self._free.get_nowait()
        except queue.Empty:
            return self._make()

    def _await_free(self) -> torch.Tensor:
        try:
            return self._free.get(timeout=_STUCK)
        except queue.Empty:
            raise RekindleError(f"other copies from the device have not ended within {_STUCK:.0f} s") from None

    def copy(
        self,
        copy: Copy,
        to: Sequence[torch.Tensor],
        source: Sequence[torch.Tensor],
        wait: Callable[[Event], object],
    ) -> None:
        """Copies as ``copy_by_bounce`` does."""
        before: _Load | None = None
        for pairs in batched(to, source, _BYTES, _ALIGN):
            buffer = self._take()
            if before is not None and buffer is None:  # never wait for others while they may wait for this one
                self._land(before, wait)
                before = None
            load = _Load(copy, buffer if buffer is not None else self._await_free(), pairs)
            if before is not None:
                self._land(before, wait)
            before = load
        if before is not None:
            self._land(before, wait)

    def _land(self, load: _Load, wait: Callable[[Event], object]) -> None:
        load.land(wait)
        self._free.put(load.buffer)  # not if that failed: a device may still write to it


class _Load:
    """A buffer that a device fills."""

    def __init__(self, copy: Copy, buffer: torch.Tensor, pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        self.buffer, self._pairs = buffer, pairs
        self._places, at = [], 0
        for _, source in pairs:
            self._places.append(buffer[at : at + source.nbytes].view(source.dtype).view(source.shape))
            at += _aligned(source.nbytes)
        self._event = copy(self._places, [source for _, source in pairs])

    def land(self, wait: Callable[[Event], object]) -> None:
        """Waits for the device, and moves the bytes on."""
        if self._event is not None:
            wait(self._event)
        for place, (to, source) in zip(self._places, self._pairs, strict=True):
            ctypes.memmove(to.data_ptr(), place.data_ptr(), source.nbytes)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGN) * _ALIGN


_rings: dict[tuple[int, torch.device], _Ring] = {}
_making = threading.Lock()


def _ring(device: torch.device) -> _Ring:
    key = os.getpid(), device
    with _making:
        if key not in _rings:
            backend = backend_of(device)
            assert backend is not None
            _rings[key] = _Ring(backend)
        return _rings[key]
