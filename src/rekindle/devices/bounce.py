"""Copies from devices into memory that is not page-locked, by way of a little that is.

A device's copy into other memory makes its caller wait and, with CUDA, every thread that launches a kernel meanwhile.
Here the device copies into a ring of page-locked buffers, and the caller moves the bytes on to where they belong.
"""

from __future__ import annotations

import ctypes
import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress

import torch

from rekindle.devices.batches import batched
from rekindle.devices.events import Event, await_device, wait_for_copy
from rekindle.devices.table import PerDevice, require_backend

__all__ = ["copy_by_bounce", "prepare_bounce"]

_BYTES = 16 << 20
"""Bytes of a buffer: 0.3 ms of a bus of 50 GB/s, long enough that queueing a copy costs little beside it, and a third
of the largest batch, so that the device fills one buffer while a thread empties the one before."""
_BUFFERS = 4
"""Buffers of a ring, two for each of two threads; more threads wait for them. Together they cost 64 MiB of memory."""
_ALIGN = 64

Copy = Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor]], Event | None]
"""Queues copies from one device, and returns the event of their end."""


def copy_by_bounce(
    device: torch.device,
    copy: Copy,
    to: Sequence[torch.Tensor],
    source: Sequence[torch.Tensor],
    *,
    rescue: bool = False,
) -> None:
    """Copies with ``copy`` from ``device`` into host tensors without gaps. Returns when that is done.

    Raises RekindleError when the device is stuck. With ``rescue`` the copy goes through buffers that only a copy after
    a fault uses. For any thread that entered the device.
    """
    (_rescue_rings if rescue else _rings).of(device).copy(copy, to, source)


def prepare_bounce(device: torch.device) -> None:
    """Makes all buffers, for a time when a device that is stuck would let nobody have page-locked memory."""
    for rings in (_rings, _rescue_rings):
        rings.of(device).fill()


class _Ring:
    """Page-locked buffers of one device, for all threads. Made when they are needed, and kept."""

    def __init__(self, device: torch.device) -> None:
        self._backend = require_backend(device)
        self._free: queue.SimpleQueue[torch.Tensor] = queue.SimpleQueue()
        self._given_up: queue.SimpleQueue[_Load] = queue.SimpleQueue()
        """Loads that nobody waits for any more, while the device may still fill their buffers."""
        self._made, self._making = 0, threading.Lock()

    def fill(self) -> None:
        """Makes the buffers that there are not yet."""
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
        self._take_back()
        try:
            return self._free.get_nowait()
        except queue.Empty:
            return self._make()

    def _take_back(self) -> None:
        """Frees the buffers that the device has filled since they were given up."""
        for _ in range(self._given_up.qsize()):
            with suppress(queue.Empty):  # another thread was faster
                load = self._given_up.get_nowait()
                if load.filled():
                    self._free.put(load.buffer)
                else:
                    self._given_up.put(load)

    def _await_free(self) -> torch.Tensor:
        return await_device(self._find_free, "other copies from the device have not ended")

    def _find_free(self, seconds: float) -> torch.Tensor | None:
        self._take_back()
        try:
            return self._free.get(timeout=seconds)
        except queue.Empty:
            return self._make()

    def copy(self, copy: Copy, to: Sequence[torch.Tensor], source: Sequence[torch.Tensor]) -> None:
        """Copies as ``copy_by_bounce`` does."""
        under_way: deque[_Load] = deque()
        try:
            for pairs in batched(to, source, _BYTES, _ALIGN):
                buffer = self._take()
                if buffer is None:  # never wait for others while they may wait for this one
                    self._empty(under_way, leave=0)
                    buffer = self._await_free()
                under_way.append(self._fill(copy, buffer, pairs))
                self._empty(under_way, leave=1)
            self._empty(under_way, leave=0)
        finally:
            for load in under_way:
                self._given_up.put(load)

    def _fill(self, copy: Copy, buffer: torch.Tensor, pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> _Load:
        """Has the device fill a buffer. If that fails, another is made for it when one is needed.

        The device may have been told of some of the copies: torch keeps the memory from others until they are done.
        """
        try:
            return _Load(copy, buffer, pairs)
        except BaseException:
            with self._making:
                self._made -= 1
            raise

    def _empty(self, under_way: deque[_Load], leave: int) -> None:
        """Empties the oldest loads, and frees their buffers."""
        while len(under_way) > leave:
            under_way[0].empty()
            self._free.put(under_way.popleft().buffer)


class _Load:
    """A buffer that a device fills with the bytes of some tensors."""

    def __init__(self, copy: Copy, buffer: torch.Tensor, pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        self.buffer, self._pairs = buffer, pairs
        self._places, at = [], 0
        for _, source in pairs:
            self._places.append(buffer[at : at + source.nbytes].view(source.dtype).view(source.shape))
            at += _aligned(source.nbytes)
        self._event = copy(self._places, [source for _, source in pairs])

    def filled(self) -> bool:
        """Returns True if the device writes to the buffer no more; False also when it has failed."""
        try:
            return self._event is None or self._event.reached()
        except RuntimeError:
            return False

    def empty(self) -> None:
        """Waits for the device, and moves the bytes to where they belong."""
        if self._event is not None:
            wait_for_copy(self._event)
        for place, (to, source) in zip(self._places, self._pairs, strict=True):
            ctypes.memmove(to.data_ptr(), place.data_ptr(), source.nbytes)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGN) * _ALIGN


_rings = PerDevice(_Ring)
_rescue_rings = PerDevice(_Ring)
"""Buffers for copies after a fault. Those that training shares may all be in use, by copies that are stuck."""
