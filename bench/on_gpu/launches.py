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
from on_gpu.results import NotMeasured, Report

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
    waited = not event.query() and all(thread.is_alive() for thread in threads)
    stop.set()
    for thread in threads:
        thread.join()
    torch.cuda.synchronize()
    if not waited:
        raise NotMeasured(f"did not happen: {len(threads)} threads wait for an event as long as launches are made")
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
    report.require(bool(rates["nobody"]), "launches while threads waited for an event")
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
    report.require(code == 0, f"the flag is page-locked (error code {code})")
    flag, address = ctypes.c_uint32.from_buffer(memory.map), driver.device_address(memory.address)
    flag.value = 1
    stream = torch.cuda.Stream()
    _closed(report, driver, flag, address, x)

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
    took = time.perf_counter() - began
    report.require(held, "a closed gate holds the device")
    report.figure("a closed gate holds the device", str(held), expected="True", met=held)
    report.figure("opened until the device is through", took * 1e3, "ms", high=5)


def _capture(x: torch.Tensor) -> None:
    """Capture launches in global mode, for long enough that other threads have their say. Raises RuntimeError."""
    before = float(x[0])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="global"):
        for _ in range(100):
            x.add_(1)
            time.sleep(1e-3)
    graph.replay()
    if float(x[0]) != before + 100:
        raise RuntimeError(f"the replayed graph added {float(x[0]) - before:g}, not 100")


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
    queries = [0]

    def poll() -> None:
        driver.adopt()
        if relaxed:
            driver.exchange_capture_mode(RELAXED)
        while not stop.is_set():
            try:
                event.query()
                queries[0] += 1
            except RuntimeError as error:
                refusals.append(str(error).splitlines()[0])
                return
            time.sleep(1e-3)

    thread = threading.Thread(target=poll)
    thread.start()
    while not queries[0] and thread.is_alive():
        time.sleep(1e-3)
    before = queries[0]
    try:
        _capture(x)
        speaker.say(ended="passes")
    except RuntimeError as error:
        speaker.say(ended=f"fails: {str(error).splitlines()[0]}")
    stop.set()
    thread.join()
    speaker.say(refused=refusals[:1], queries=queries[0] - before)


def capture_beside_a_snapshot(speaker: Speaker, memory: str, disk: str) -> None:
    import rekindle

    parameters, optimizer = counting_state(GIB)
    x = torch.ones(8, device="cuda")
    state = {"parameters": parameters, "optimizer": optimizer}
    ckpt = rekindle.Checkpointer(
        Path(disk) / "run", state, memory=memory, snapshot_every=1, persist_every=10**9, strict=True, overlap=True
    )
    ckpt.restore()
    ended, saved, step = [], [], 0
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
        newest = ckpt.latest()  # waits for the snapshot
        saved.append(ckpt.metrics.saves > saves and newest is not None and newest.step == step)
        speaker.say(ended=ended, saved=saved, failed=ckpt.metrics.failed)


def capture(report: Report, places: Places) -> None:
    for relaxed, expected in ((False, "fails"), (True, "passes")):
        what = f"beside a thread that queries, its mode {'relaxed' if relaxed else 'as torch leaves it'}"
        with report.part(what):
            with Case("on_gpu.launches:capture_beside_a_poller", {"relaxed": relaxed}) as case:
                found = case.result(min(report.left, 12))
            # In its own mode the first query is refused, and ends the thread: that it was made is proof enough.
            asked = found["queries"] > 0 or bool(found["refused"])
            report.require(asked, "another thread queried an event during the capture")
            report.figure(what, found["ended"], expected=expected, met=found["ended"].startswith(expected))
    with report.part("beside a snapshot"):
        _beside_a_snapshot(report, places)


def _beside_a_snapshot(report: Report, places: Places) -> None:
    with Case("on_gpu.launches:capture_beside_a_snapshot", {"memory": places.memory, "disk": places.disk}) as case:
        found = case.result(report.left)
    ended = found["ended"]
    report.require(found["saves"] > 0, "snapshots were in memory before the captures")
    report.require(len(ended) == 3 and all(found["saved"]), "a snapshot was made beside each capture")
    report.figure(
        "beside a snapshot's copy of 1 GiB", ", ".join(ended), expected="passes", met=set(ended) == {"passes"}
    )
    report.figure("snapshots that failed meanwhile", found["failed"], high=0)
