"""Page-locks mapped host memory, so that devices copy into it at the speed of the bus, beside the host."""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import threading
from collections.abc import Callable, Collection

import torch

from rekindle.common.workers import ending
from rekindle.devices.backend import Backend
from rekindle.devices.table import backend_of, current_devices

__all__ = ["PageLocker", "locked_ranges"]

log = logging.getLogger("rekindle")

_Memory = mmap.mmap | ctypes.Array[ctypes.c_char]
"""Mapped memory, or a view of it that doesn't keep it mapped: then its owner keeps the lock."""


_locked: dict[int, int] = {}
"""Ends of the page-locked ranges of memory by their starts."""


def locked_ranges() -> list[tuple[int, int]]:
    """Returns starts and ends of the memory that is page-locked now, in order. A copy must not reach beyond one."""
    return sorted(_locked.copy().items())


_warned = False
"""True once the process has been warned: memory is locked in parts, for each slot, and all may fail alike."""


def _warn_once(error: BaseException) -> None:
    global _warned
    if not _warned:
        log.warning(
            "host memory can't be page-locked (%s): training goes on, but devices copy into it by way of other "
            "memory, and updates wait on the host for the rest of a copy. See that 'ulimit -l' is unlimited (in "
            "containers --ulimit memlock=-1), and that the node has memory to spare. This is said once",
            error,
        )
    _warned = True


class PageLocker:
    """Page-locks memory for a device. Thread-safe."""

    def __init__(self, devices: Collection[torch.device] = ()) -> None:
        """``devices``: those that copy into the memory. If none are given, the calling thread's one counts.

        A thread may never have chosen its device, which is then the first one, though its state is on another: to lock
        memory there would open that device, and take some of its memory.
        """
        self.device = next(iter(devices or current_devices()), None)
        """Any one of them; None if this process used none when the object was made."""

    def numa_node(self) -> int | None:
        """Returns the node of memory that the device is nearest to; None without a device, or if that is not known."""
        backend = backend_of(self.device) if self.device is not None else None
        return None if backend is None or self.device is None else backend.numa_node(self.device)

    def lock(self, mapping: _Memory, start: int = 0, stop: int | None = None) -> object:
        """Page-locks bytes ``start`` to ``stop`` of ``mapping``, by default all, until the result is dropped.

        Returns None if no device is in use or, after the process's one warning, if it fails: copies are slower then.
        """
        stop = len(mapping) if stop is None else stop
        backend = backend_of(self.device) if self.device is not None else None
        if backend is None or self.device is None:
            return None
        lock = _LockedRange(backend, self.device, mapping, start, stop)
        if lock.error:
            _warn_once(lock.error)
        return lock if lock.held else None


class _LockedRange:
    """Keeps memory page-locked until this object is dropped."""

    def __init__(
        self,
        backend: Backend,
        device: torch.device,
        mapping: _Memory,
        start: int,
        stop: int,
    ) -> None:
        self._backend, self._device, self._pid = backend, device, os.getpid()
        self._anchor = ctypes.c_char.from_buffer(mapping, start)
        self._address = ctypes.addressof(self._anchor)
        self.held = False
        self.error: BaseException | None = None
        self._in_own_thread(lambda: self._register(stop - start))

    def _register(self, nbytes: int) -> None:
        self.held = self._backend.register(self._address, nbytes)
        if self.held:
            _locked[self._address] = self._address + nbytes

    def _in_own_thread(self, work: Callable[[], None]) -> None:
        """Calls the device where nobody else does.

        A failed call leaves an error behind, which its thread's next kernel would raise. A thread that has not entered
        the device would open another one.
        """

        def run() -> None:
            try:
                self._backend.enter(self._device)
                work()
            except (OSError, RuntimeError) as error:
                self.error = error

        thread = threading.Thread(target=run, name="rekindle-page-lock")
        thread.start()
        thread.join()

    def __del__(self) -> None:
        if self.held:
            _locked.pop(self._address, None)
        # A forked child has no device to tell. At the process's end no thread starts, and the driver unlocks all.
        if self.held and os.getpid() == self._pid and not ending():
            self._in_own_thread(lambda: self._backend.unregister(self._address))
