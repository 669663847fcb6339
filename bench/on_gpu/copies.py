"""Experiments on copies between the device and the host."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import torch
from sizes import GIB, MIB

from on_gpu.cuda import (
    Driver,
    SharedMemory,
    copy_seconds,
    populate,
    register,
    seconds,
    unregister,
)
from on_gpu.places import Places
from on_gpu.results import NotMeasured, Report

__all__ = ["bus", "bus_speed", "item", "pageable", "registered"]


def _noise(nbytes: int) -> torch.Tensor:
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, device="cuda")


def bus_speed(nbytes: int = GIB) -> tuple[float, float]:
    """GB/s from and to the device, with memory that torch has page-locked. Raises NotMeasured if no such copy was made.

    A copy of memory that isn't page-locked falls back to a way over other memory, and is slower.
    """
    there = _noise(nbytes)
    here = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    if not (here.is_pinned() and there.is_cuda):
        raise NotMeasured("did not happen: a copy between a device and page-locked memory")
    down = nbytes / 1e9 / copy_seconds(here, there)
    kept = there.clone()
    there.zero_()
    up = nbytes / 1e9 / copy_seconds(there, here)
    if not torch.equal(there, kept):
        raise NotMeasured("did not happen: the bytes that came back from the host are those that went there")
    return down, up


def bus(report: Report, places: Places) -> None:
    down, up = bus_speed()
    report.require(down > 0 < up, "page-locked copies each way, and the bytes came back as they went")
    report.figure("from the device", down, "GB/s", low=50, high=55)
    report.figure("to the device", up, "GB/s", low=50, high=55)
    for nbytes in (32 * MIB, MIB):
        speed, _ = bus_speed(nbytes)
        report.figure(f"from the device, {nbytes // MIB} MiB at a time", speed, "GB/s")


def registered(report: Report, places: Places) -> None:
    limit, _ = bus_speed()
    report.require(limit > 0, "page-locked copies of the bus")
    report.figure("the bus", limit, "GB/s", low=50, high=55)
    there = _noise(GIB)
    for kind, directory in (("4 KiB pages", places.memory), ("huge pages", places.huge)):
        if directory is None:
            report.left_out(kind, places.kind)
            continue
        with report.part(kind):
            _registered(report, kind, directory, there, limit)
    with report.part("across a border"):
        _across_a_border(report, places, there)


def _registered(report: Report, kind: str, directory: str, there: torch.Tensor, limit: float) -> None:
    memory = SharedMemory(directory, GIB)
    populate(memory, 8)
    code = register(memory.address, GIB)
    report.require(code == 0, f"the memory is page-locked (error code {code})")
    report.require(memory.is_huge() is (kind == "huge pages"), f"the memory is of {kind}")
    down = GIB / 1e9 / copy_seconds(memory.bytes, there)
    report.require(torch.equal(memory.bytes, there.cpu()), "the bytes arrived")
    report.figure(f"{kind}: is_pinned()", str(memory.bytes.is_pinned()))
    report.figure(f"{kind}: from the device / bus", down / limit, low=0.97, high=1.03)
    report.figure(f"{kind}: the call of copy_ / the copy", _call_share(memory.bytes, there), high=0.1)
    report.figure(f"{kind}: to the device", GIB / 1e9 / copy_seconds(there, memory.bytes), "GB/s", low=50, high=55)
    unregister(memory.address)


def _call_share(to: torch.Tensor, source: torch.Tensor) -> float:
    """Share of a copy for which the call of ``copy_`` lasts: near 1 if it isn't asynchronous."""
    torch.cuda.synchronize()
    began = time.perf_counter()
    to.copy_(source, non_blocking=True)
    called = time.perf_counter() - began
    torch.cuda.synchronize()
    return called / (time.perf_counter() - began)


def _across_a_border(report: Report, places: Places, there: torch.Tensor) -> None:
    """A copy whose host side begins in one registration and ends in the next one."""
    memory = SharedMemory(places.memory, 2 * GIB)
    populate(memory, 8)
    codes = [register(memory.address + start, GIB) for start in (0, GIB)]
    report.require(codes == [0, 0], f"two registrations side by side (error codes {codes})")
    start, driver, stream = GIB // 2, Driver(), torch.cuda.Stream()
    host = memory.bytes[start : start + GIB]
    code = driver.copy_to_host(host.data_ptr(), there.data_ptr(), GIB, stream)
    stream.synchronize()
    shown = f"error {code}" if code else f"fine, equal: {torch.equal(host, there.cpu())}"
    report.figure("across their border, driver", shown, expected="error 1, or fine", met=code in (0, 1))
    try:
        speed = GIB / 1e9 / copy_seconds(host, there, 3)
        report.figure("across their border, copy_", speed, "GB/s", "an error, or the bus")
    except RuntimeError as error:
        report.figure("across their border, copy_", str(error).splitlines()[0], expected="an error, or the bus")


def pageable(report: Report, places: Places) -> None:
    size = 4 * GIB
    there = _noise(size)
    host = torch.zeros(size, dtype=torch.uint8)
    locked = SharedMemory(places.memory, size)
    populate(locked, 8)
    code = register(locked.address, size)
    report.require(code == 0, f"the memory is page-locked (error code {code})")
    x = torch.ones(8, device="cuda")
    for name, to, low, high in (("pageable", host, 0.8, None), ("page-locked", locked.bytes, None, 0.05)):
        took, longest, launched = _launches_beside(lambda to=to: to.copy_(there, non_blocking=True), x)
        report.require(to.is_pinned() is (name == "page-locked"), f"the copy went into {name} memory")
        report.require(torch.equal(to[-MIB:], there[-MIB:].cpu()), f"the bytes of the {name} copy arrived")
        report.require(launched > 0, f"a launch beside the {name} copy")
        report.figure(f"{name}: the copy", size / 1e9 / took, "GB/s")
        report.figure(f"{name}: launches meanwhile", launched / took, "per s")
        report.figure(f"{name}: longest launch", longest * 1e3, "ms")
        report.figure(f"{name}: longest launch / copy", longest / took, low=low, high=high)


def _launches_beside(copy: Callable[[], object], x: torch.Tensor) -> tuple[float, float, int]:
    """Seconds of a copy in a thread, seconds of the longest launch meanwhile, and the number of launches."""
    begun = threading.Event()

    def work() -> float:
        try:
            torch.cuda.set_device(0)
            stream = torch.cuda.Stream()
        finally:
            begun.set()
        with torch.cuda.stream(stream):
            began = time.perf_counter()
            copy()
            stream.synchronize()
            return time.perf_counter() - began

    x.add_(1)
    torch.cuda.synchronize()
    longest, launched = 0.0, 0
    with ThreadPoolExecutor(1) as pool:
        copied = pool.submit(work)
        begun.wait()
        while not copied.done():
            began = time.perf_counter()
            x.add_(1)
            longest = max(longest, time.perf_counter() - began)
            launched += 1
            time.sleep(1e-4)  # so that the queue of launches is never full
    return copied.result(), longest, launched


def item(report: Report, places: Places) -> None:
    size, piece = 8 * GIB, 32 * MIB
    there = _noise(size)
    host = SharedMemory(places.memory, size)
    populate(host, 8)
    code = register(host.address, size)
    report.require(code == 0, f"the memory is page-locked (error code {code})")
    x = torch.ones(8, device="cuda")
    side = torch.cuda.Stream()
    alone = _longest_item(x, lambda: None, side)
    report.figure("nothing beside it", alone.longest * 1e3, "ms, longest")

    def whole() -> None:
        host.bytes.copy_(there, non_blocking=True)

    def pieces() -> None:
        for start in range(0, size, piece):
            host.bytes[start : start + piece].copy_(there[start : start + piece], non_blocking=True)

    for name, copy, low, high in (("one piece", whole, 50, 250), ("pieces of 32 MiB", pieces, None, 2)):
        host.bytes[-MIB:].zero_()
        items = _longest_item(x, copy, side)
        report.require(items.beside > 0, f".item() was called while the copy in {name} ran")
        report.require(torch.equal(host.bytes[-MIB:], there[-MIB:].cpu()), f"the bytes of the copy in {name} arrived")
        expected = "160 ms" if copy is whole else ""
        report.figure(f"beside {name}", items.longest * 1e3, "ms, longest", expected, low=low, high=high)
        report.figure(f"beside {name}, median", items.median * 1e3, "ms")
    took = seconds(whole), seconds(pieces)
    report.figure("8 GiB in pieces / in one", took[1] / took[0], low=0.9, high=1.1)


class _Items(NamedTuple):
    """Seconds of calls of ``.item()``."""

    longest: float
    median: float
    beside: int
    """Calls that began while a copy ran."""


def _longest_item(x: torch.Tensor, copy: Callable[[], object], side: torch.cuda.Stream) -> _Items:
    """Call ``.item()`` while a copy runs, at least 20 times."""
    torch.cuda.synchronize()
    event = torch.cuda.Event()
    with torch.cuda.stream(side):
        copy()
        event.record()
    times: list[float] = []
    beside = 0
    while (running := not event.query()) or len(times) < 20:
        beside += running
        began = time.perf_counter()
        (x + 1).sum().item()
        times.append(time.perf_counter() - began)
    return _Items(max(times), statistics.median(times), beside)
