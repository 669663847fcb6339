"""Calls CUDA's driver where torch has no words for it, and keeps host memory that can be page-locked."""

from __future__ import annotations

import ctypes
import mmap
import os
import re
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch

__all__ = [
    "GLOBAL",
    "HUGE",
    "PORTABLE",
    "RELAXED",
    "Driver",
    "DriverError",
    "Longest",
    "SharedMemory",
    "clear_error",
    "copy_seconds",
    "huge_bytes",
    "is_busy",
    "cycles_per_second",
    "populate",
    "register",
    "seconds",
    "spin",
    "synchronize",
    "unregister",
]

PORTABLE, MAPPED = 1, 2
"""Flags of cudaHostRegister: for all devices of the process; with an address on the device."""
GLOBAL, THREAD_LOCAL, RELAXED = 0, 1, 2
"""Stream capture modes of a thread, CUstreamCaptureMode."""
GEQ = 0
"""CU_STREAM_WAIT_VALUE_GEQ: wait until the value is at least the given one."""
NOT_READY = 600
"""CUDA_ERROR_NOT_READY."""
HUGE = 2 << 20
_MADV_POPULATE_WRITE = 23

_int, _uint, _u32, _u64, _size, _pointer = (
    *(ctypes.c_int, ctypes.c_uint, ctypes.c_uint32, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p),
)
_SIGNATURES: dict[str, list[Any]] = {
    "cuDriverGetVersion": [ctypes.POINTER(_int)],
    "cuDeviceGet": [ctypes.POINTER(_int), _int],
    "cuDeviceGetAttribute": [ctypes.POINTER(_int), _int, _int],
    "cuCtxGetCurrent": [ctypes.POINTER(_pointer)],
    "cuCtxSetCurrent": [_pointer],
    "cuGetErrorName": [_int, ctypes.POINTER(ctypes.c_char_p)],
    "cuMemcpyDtoHAsync_v2": [_pointer, _u64, _size, _pointer],
    "cuMemHostGetDevicePointer_v2": [ctypes.POINTER(_u64), _pointer, _uint],
    "cuStreamQuery": [_pointer],
    "cuStreamWaitValue32_v2": [_pointer, _u64, _u32, _uint],
    "cuThreadExchangeStreamCaptureMode": [ctypes.POINTER(_int)],
}
_ATTRIBUTES = {
    "asynchronous copy engines": 40,
    "pageable memory access": 88,
    "host pointer for registered memory": 91,
    "64-bit stream memory operations": 122,
    "wait value nor": 123,
    "host register supported": 99,
    "host NUMA node": 134,
}
"""Numbers in CUdevice_attribute."""


class DriverError(RuntimeError):
    def __init__(self, name: str, code: int, word: str) -> None:
        super().__init__(f"{name}: error {code}, {word}")
        self.code = code


class Driver:
    """CUDA's driver API by ctypes, which releases the interpreter lock. A thread calls ``adopt`` before all else."""

    def __init__(self) -> None:
        """Needs torch's context: call it after the first use of the device."""
        self._lib = ctypes.CDLL("libcuda.so.1")
        for name, types in _SIGNATURES.items():
            function = getattr(self._lib, name)
            function.argtypes, function.restype = types, _int
        self._context = _pointer()
        self.call("cuCtxGetCurrent", ctypes.byref(self._context))

    def call(self, name: str, *arguments: Any) -> None:
        """Raises DriverError for any result but 0."""
        code = self.result(name, *arguments)
        if code:
            word = ctypes.c_char_p()
            self._lib.cuGetErrorName(code, ctypes.byref(word))
            raise DriverError(name, code, (word.value or b"unknown").decode())

    def result(self, name: str, *arguments: Any) -> int:
        """Returns the error code."""
        return int(getattr(self._lib, name)(*arguments))

    def adopt(self) -> None:
        """Give the calling thread the context of the thread that made this object."""
        self.call("cuCtxSetCurrent", self._context)

    @property
    def version(self) -> int:
        found = _int()
        self.call("cuDriverGetVersion", ctypes.byref(found))
        return found.value

    def attributes(self) -> dict[str, int]:
        """Returns what the device says of itself; -1 for what this driver doesn't know."""
        device, found = _int(), {}
        self.call("cuDeviceGet", ctypes.byref(device), 0)
        for name, number in _ATTRIBUTES.items():
            value = _int(-1)
            self.result("cuDeviceGetAttribute", ctypes.byref(value), number, device.value)
            found[name] = value.value
        return found

    def exchange_capture_mode(self, mode: int) -> int:
        """Set the calling thread's capture mode and return the one before."""
        given = _int(mode)
        self.call("cuThreadExchangeStreamCaptureMode", ctypes.byref(given))
        return given.value

    def copy_to_host(self, to: int, source: int, nbytes: int, stream: torch.cuda.Stream) -> int:
        """Returns the error code of an asynchronous copy between addresses."""
        return self.result("cuMemcpyDtoHAsync_v2", to, source, nbytes, stream.cuda_stream)

    def has_ended(self, stream: torch.cuda.Stream) -> bool:
        """True if the stream has done all of its work."""
        code = self.result("cuStreamQuery", stream.cuda_stream)
        if code not in (0, NOT_READY):
            raise DriverError("cuStreamQuery", code, "")
        return code == 0

    def device_address(self, host: int) -> int:
        """Returns the device's address of memory that was registered with MAPPED."""
        found = _u64()
        self.call("cuMemHostGetDevicePointer_v2", ctypes.byref(found), host, 0)
        return found.value

    def wait_value(self, stream: torch.cuda.Stream, address: int, value: int) -> None:
        """Queue a wait, on the device, until the 32 bits at ``address`` are ``value`` or more."""
        self.call("cuStreamWaitValue32_v2", stream.cuda_stream, address, value, GEQ)


class SharedMemory:
    """A mapping of a file in a tmpfs, as snapshots are. The file has no name unless it is given one."""

    def __init__(self, directory: str | Path, nbytes: int, name: str | None = None, allocate: bool = False) -> None:
        path = Path(directory) / name if name else None
        with path.open("w+b") if path else tempfile.TemporaryFile(dir=directory) as file:
            os.ftruncate(file.fileno(), nbytes)
            if allocate:
                os.posix_fallocate(file.fileno(), 0, nbytes)
            self.map = mmap.mmap(file.fileno(), nbytes)
            self._file = os.dup(file.fileno())
        self.bytes = torch.frombuffer(self.map, dtype=torch.uint8)
        self.address: int = self.bytes.data_ptr()
        self.nbytes = nbytes

    def __del__(self) -> None:
        if hasattr(self, "_file"):
            os.close(self._file)

    def allocated(self) -> int:
        """Returns the bytes of the file that have pages."""
        return os.fstat(self._file).st_blocks * 512

    def is_huge(self) -> bool:
        """True if huge pages map all of it, but for what is left beyond the last whole one."""
        return huge_bytes(self.address) >= self.nbytes // HUGE * HUGE - 2 * HUGE


def huge_bytes(address: int) -> int:
    """Returns the bytes of this process's mapping at ``address`` that huge pages of a tmpfs map."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            start, stop = (int(text, 16) for text in line.split()[0].split("-"))
            inside = start <= address < stop
        elif inside and line.startswith("ShmemPmdMapped:"):
            return int(line.split()[1]) << 10
    return 0


@cache
def _libc() -> ctypes.CDLL:
    lib = ctypes.CDLL(None, use_errno=True)
    lib.madvise.argtypes, lib.madvise.restype = [_pointer, _size, _int], _int
    return lib


def populate(memory: SharedMemory, threads: int) -> None:
    """Make all pages, by so many threads. Raises OSError where the memory is full."""
    piece = -(-memory.nbytes // threads // HUGE) * HUGE

    def make(start: int) -> None:
        length = min(piece, memory.nbytes - start)
        if _libc().madvise(memory.address + start, length, _MADV_POPULATE_WRITE):
            number = ctypes.get_errno()
            raise OSError(number, f"populating {length} bytes: {os.strerror(number)}")

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(make, range(0, memory.nbytes, piece)))


def register(address: int, nbytes: int, flags: int = PORTABLE) -> int:
    """Page-lock memory and return the error code. An error stays pending in the calling thread, see clear_error."""
    return int(torch.cuda.cudart().cudaHostRegister(address, nbytes, flags))


def unregister(address: int) -> int:
    return int(torch.cuda.cudart().cudaHostUnregister(address))


def clear_error() -> int:
    """Fetch and clear the calling thread's pending error, in the runtime library that torch has loaded."""
    mapped = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "libcudart" in line}
    if not mapped:
        raise RuntimeError("torch was built without a libcudart of its own file")
    return int(ctypes.CDLL(mapped.pop()).cudaGetLastError())


@cache
def cycles_per_second() -> float:
    """Cycles that torch.cuda._sleep counts in a second: the clock is slow at first, so the third try counts."""
    for _ in range(3):
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        before.record()
        torch.cuda._sleep(2 * 10**8)
        after.record()
        torch.cuda.synchronize()
    return 2e8 / (before.elapsed_time(after) / 1e3)


def spin(seconds: float) -> None:
    """Keep the current stream busy for so long, with a kernel that uses one multiprocessor only."""
    torch.cuda._sleep(int(seconds * cycles_per_second()))


def synchronize() -> None:
    """Wait until the device is idle. Does nothing where the process uses none."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def is_busy() -> bool:
    """Returns True if the current stream has not yet done all that is queued."""
    event = torch.cuda.Event()
    event.record()
    return not event.query()


def seconds(work: Callable[[], object]) -> float:
    """Of one call, the device's part included."""
    synchronize()
    began = time.perf_counter()
    work()
    synchronize()
    return time.perf_counter() - began


def copy_seconds(to: torch.Tensor, source: torch.Tensor, count: int = 7) -> float:
    """Median of one copy."""
    return statistics.median(seconds(lambda: to.copy_(source, non_blocking=True)) for _ in range(count))


class Longest:
    """Calls something again and again in a thread, and keeps the longest time that one call took."""

    def __init__(self, call: Callable[[], object], pause: float = 0.0) -> None:
        self._call, self._pause = call, pause
        self.seconds, self.calls = 0.0, 0
        self._stop = threading.Event()

    def _run(self) -> None:
        while not self._stop.is_set():
            began = time.perf_counter()
            self._call()
            self.seconds = max(self.seconds, time.perf_counter() - began)
            self.calls += 1
            time.sleep(self._pause)

    @contextmanager
    def watched(self) -> Iterator[Longest]:
        self.seconds, self.calls = 0.0, 0
        self._stop.clear()
        thread = threading.Thread(target=self._run, daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self._stop.set()
            thread.join()
