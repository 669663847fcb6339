"""Experiments on launches: pollers beside them, a gate before them, and their capture into graphs."""

from __future__ import annotations

import ctypes
import statistics
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from sizes import GIB

from on_gpu.cases import Case, Speaker
from on_gpu.cuda import MAPPED, PORTABLE, RELAXED, Driver, SharedMemory, register, seconds, spin
from on_gpu.network import counting_state
from on_gpu.places import Places
from on_gpu.results import Report

__all__ = ["capture", "capture_beside_a_poller", "capture_beside_a_snapshot", "gate", "pollers"]

_LAUNCHES = 20_000
_FIRST, _LONGEST = 1e-4, 2e-3
"""Seconds between two looks at an event: of a poller, and the bound of one that backs off."""


def _poll(event: torch.cuda.Event, stop: threading.Event, longest: float) -> None:
    pause = _FIRST
    while not stop.is_set() and not event.query():
        time.sleep(pause)
        pause = min(pause * 2, longest)


def _wait(event: torch.cuda.Event, stop: threading.Event) -> None:
    event.synchronize()


def _rate(waiters: list[Callable[[torch.cuda.Event, threading.Event], None]], x: torch.Tensor) -> float:
    """Launches a second of a loop of small kernels, beside threads that wait for an event."""
    side, event, stop = torch.cuda.Stream(), torch.cuda.Event(blocking=True), threading.Event()
    with torch.cuda.stream(side):
        spin(0.8)
        event.record()
    threads = [threading.Thread(target=waiter, args=(event, stop)) for waiter in waiters]
    for thread in threads:
        thread.start()
    main = torch.cuda.current_stream()
    began = time.perf_counter()
    for _ in range(_LAUNCHES):
        x.add_(1)
    main.synchronize()
    took = time.perf_counter() - began
    behind = event.query()
    stop.set()
    for thread in threads:
        thread.join()
    torch.cuda.synchronize()
    if behind:
        raise RuntimeError(f"the device was done after {took:.2f} s: nothing was waited for to the end")
    return _LAUNCHES / took


def pollers(report: Report, places: Places) -> None:
    x = torch.ones(8, device="cuda")
    for _ in range(1000):
        x.add_(1)
    eager = partial(_poll, longest=_FIRST)
    patient = partial(_poll, longest=_LONGEST)
    kinds = {
        "nobody": [],
        "1 thread that polls at 0.1 ms": [eager],
        "7 threads that poll at 0.1 ms": [eager] * 7,
        "1 thread that backs off to 2 ms": [patient],
        "7 threads that back off to 2 ms": [patient] * 7,
        "1 thread in synchronize()": [_wait],
    }
    rates: dict[str, list[float]] = {name: [] for name in kinds}
    for _ in range(3):  # in turn, so that a drift of the clocks meets all of them
        if report.left < 12:
            break
        for name, waiters in kinds.items():
            rates[name].append(_rate(waiters, x))
    report.raw("launches per second", rates)
    alone = statistics.median(rates["nobody"])
    report.figure("nobody", alone, "launches/s")
    bounds = {"7 threads that poll at 0.1 ms": (-60.0, -20.0)}
    for name in list(kinds)[1:]:
        low, high = bounds.get(name, (-15.0, None))
        report.figure(name, 100 * (statistics.median(rates[name]) / alone - 1), "%", low=low, high=high)


def gate(report: Report, places: Places) -> None:
    x = torch.ones(8, device="cuda")
    torch.cuda.synchronize()
    driver = Driver()
    report.raw("attributes", driver.attributes())
    memory = SharedMemory(places.memory, 1 << 16)
    code = register(memory.address, memory.nbytes, PORTABLE | MAPPED)
    report.figure("page-lock of the flag", code, "(error code)", low=0, high=0)
    flag, address = ctypes.c_uint32.from_buffer(memory.map), driver.device_address(memory.address)
    flag.value = 1
    stream = torch.cuda.Stream()

    def plain() -> None:
        for _ in range(_LAUNCHES):
            x.add_(1)

    def gated() -> None:
        for _ in range(_LAUNCHES):
            driver.wait_value(stream, address, 1)
            x.add_(1)

    with torch.cuda.stream(stream):
        plain()
        pairs = [(seconds(plain), seconds(gated)) for _ in range(5)]
    price = statistics.median(after - before for before, after in pairs) / _LAUNCHES
    report.figure("an open gate before a launch", price * 1e6, "us", high=3)
    _closed(report, driver, flag, address, x)


def _closed(report: Report, driver: Driver, flag: ctypes.c_uint32, address: int, x: torch.Tensor) -> None:
    event, stream = torch.cuda.Event(), torch.cuda.Stream()
    flag.value = 0
    try:
        with torch.cuda.stream(stream):
            driver.wait_value(stream, address, 1)
            x.add_(1)
            event.record()
        time.sleep(0.1)
        held = not event.query()
    finally:
        flag.value = 1  # a device behind a closed gate would never end
    began = time.perf_counter()
    stream.synchronize()
    report.figure("a closed gate holds the device", str(held), expected="True", met=held)
    report.figure("opened until the device is through", (time.perf_counter() - began) * 1e3, "ms", high=5)


def _capture(x: torch.Tensor) -> None:
    """Capture launches in global mode, for long enough that other threads have their say."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="global"):
        for _ in range(100):
            x.add_(1)
            time.sleep(1e-3)
    graph.replay()
    torch.cuda.synchronize()


def capture_beside_a_poller(speaker: Speaker, relaxed: bool) -> None:
    x = torch.ones(8, device="cuda")
    torch.cuda.synchronize()
    driver, stop = Driver(), threading.Event()
    side, event = torch.cuda.Stream(), torch.cuda.Event()
    with torch.cuda.stream(side):
        spin(0.01)
        event.record()
    side.synchronize()
    refusals: list[str] = []

    def poll() -> None:
        driver.adopt()
        if relaxed:
            driver.exchange_capture_mode(RELAXED)
        while not stop.is_set():
            try:
                event.query()
            except RuntimeError as error:
                refusals.append(str(error).splitlines()[0])
                return
            time.sleep(1e-3)

    thread = threading.Thread(target=poll)
    thread.start()
    try:
        _capture(x)
        speaker.say(ended="passes")
    except RuntimeError as error:
        speaker.say(ended=f"fails: {str(error).splitlines()[0]}")
    stop.set()
    thread.join()
    speaker.say(refused=refusals[:1])


def capture_beside_a_snapshot(speaker: Speaker, memory: str, disk: str) -> None:
    import rekindle

    parameters, optimizer = counting_state(GIB)
    x = torch.ones(8, device="cuda")
    state = {"parameters": parameters, "optimizer": optimizer}
    ckpt = rekindle.Checkpointer(
        Path(disk) / "run", state, memory=memory, persist_every=10**9, strict=True, overlap=True
    )
    ckpt.restore()
    ended, step = [], 0
    deadline = time.monotonic() + 30
    while ckpt.metrics.saves < 3 and time.monotonic() < deadline:
        step += 1
        optimizer.step()
        ckpt.step(step)
        ckpt.latest()
        time.sleep(0.05)
    speaker.say(saves=ckpt.metrics.saves)
    for _ in range(3):
        step += 1
        optimizer.step()
        saves = ckpt.metrics.saves
        ckpt.step(step)
        try:
            _capture(x)
            ended.append("passes")
        except RuntimeError as error:
            ended.append(f"fails: {str(error).splitlines()[0]}")
        ckpt.latest()
        speaker.say(ended=ended, saved=ckpt.metrics.saves - saves, failed=ckpt.metrics.failed)


def capture(report: Report, places: Places) -> None:
    for relaxed, expected in ((False, "fails"), (True, "passes")):
        with Case("on_gpu.launches:capture_beside_a_poller", {"relaxed": relaxed}) as case:
            ended = case.result(min(report.left, 12))["ended"]
        name = "relaxed" if relaxed else "as torch leaves it"
        what = f"beside a thread that queries, its mode {name}"
        report.figure(what, ended, expected=expected, met=ended.startswith(expected))
    with Case("on_gpu.launches:capture_beside_a_snapshot", {"memory": places.memory, "disk": places.disk}) as case:
        found = case.result(report.left)
    ended = found["ended"]
    report.figure(
        "beside a snapshot's copy of 1 GiB", ", ".join(ended), expected="passes", met=set(ended) == {"passes"}
    )
    report.figure("snapshots that failed meanwhile", found["failed"], high=0)
