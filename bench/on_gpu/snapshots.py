"""Experiments on snapshots of a training: their price, their speed, and what they hold."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sizes import GIB

from on_gpu.cases import Case, Speaker
from on_gpu.held import snapshots_in_memory
from on_gpu.places import Places
from on_gpu.results import Report

__all__ = ["complete", "every_step", "first_step", "launch_bound", "local_state", "restore_training", "train"]

_READY = 60.0
"""Seconds that memory for the first snapshots gets to be made."""


def _window(update: Callable[[], object], steps: int, save: Callable[[int], None] | None, first: int) -> float:
    """Seconds of one step of training, snapshots included."""
    from on_gpu.cuda import seconds

    def work() -> None:
        for number in range(steps):
            update()
            if save is not None:
                save(first + number)

    return seconds(work) / steps


def _until_saved(ckpt: Any, update: Callable[[], object], saves: int) -> tuple[int, float]:
    """Train until so many snapshots are in memory: the memory for them is there then.

    Returns the last step, and the seconds of the longest ``step()``.
    """
    deadline, step, longest = time.monotonic() + _READY, 0, 0.0
    while ckpt.metrics.saves < saves:
        if time.monotonic() > deadline:
            raise RuntimeError(f"{ckpt.metrics.saves} snapshots within {_READY:.0f} s, of {saves}")
        step += 1
        update()
        began = time.perf_counter()
        ckpt.step(step)
        longest = max(longest, time.perf_counter() - began)
    ckpt.latest()  # waits for the newest one
    return step, longest


def complete(ckpt: Any) -> None:
    """Wait until the newest snapshot is in memory. ``latest()`` does too, and then lists memory and storage."""
    ckpt._saver.conclude()


# -- a snapshot at every step -----------------------------------------------------------------------------------


def every_step(report: Report, places: Places, *, size: int, rows: int, rounds: int, steps: int, storage: bool) -> None:
    options = {"memory": places.memory, "disk": places.disk, "size": size}
    with Case("on_gpu.snapshots:train", {**options, "rows": rows, "rounds": rounds, "steps": steps}) as case:
        found = case.result(report.left)
    report.raw("samples", found["raw"])
    wanted = found["steps"]
    report.require(wanted > 0, "steps with a snapshot")
    report.require(found["saves"] == wanted, f"a snapshot of each of {wanted} steps: {found['saves']}")
    report.require(found["newest"] == found["step"], f"a snapshot of step {found['step']}: {found['newest']}")
    base, slow = statistics.median(found["raw"]["plain"]), statistics.median(found["raw"]["saved"])
    gigabytes, (down, up) = found["nbytes"] / 1e9, found["bus"]
    report.figure("state", gigabytes, "GB")
    report.figure("step without snapshots", base * 1e3, "ms")
    report.figure("step with one at every step", slow * 1e3, "ms")
    report.figure("slower by", 100 * (slow / base - 1), "%", high=1)
    report.figure("steps until memory was made", found["until"], "steps")
    report.figure("longest step() until then", found["first"] * 1e3, "ms")
    report.figure("host stall, later", statistics.median(found["raw"]["stalls"]) * 1e3, "ms")
    report.figure("the bus, from the device", down, "GB/s", low=50, high=55)
    report.figure("snapshot, waited for", gigabytes / found["in_memory"], "GB/s")
    report.figure("snapshot / bus", gigabytes / found["in_memory"] / down, low=0.9)
    report.figure("the bus, to the device", up, "GB/s", low=50, high=55)
    for source in ["memory", "storage"] if storage else ["memory"]:
        if report.has_time(12, f"restore from {source}"):
            with report.part(f"restore from {source}"):
                _restored(report, {**options, "close": source == "memory" and storage}, source, found)


def _restored(report: Report, options: dict[str, Any], source: str, saved: dict[str, Any]) -> None:
    """Restore in a new process: the one before was killed, or has closed, which leaves storage only."""
    with Case("on_gpu.snapshots:restore_training", options) as case:
        found = case.result(report.left)
    shown, wanted = f"step {found['step']} from {found['source']}", f"step {saved['step']} from {source}"
    report.require(shown == wanted, f"a restore of {wanted}: {shown}")
    report.require(found["fingerprint"] == saved["fingerprint"], "the restored state is the saved one")
    report.figure(f"restored, of {source}", shown, expected=wanted, met=True)
    low = 20 if source == "memory" else None
    report.figure(f"restore from {source}", saved["nbytes"] / 1e9 / found["seconds"], "GB/s", low=low)


def train(speaker: Speaker, memory: str, disk: str, size: int, rows: int, rounds: int, steps: int) -> None:
    import rekindle
    from on_gpu.copies import bus_speed
    from on_gpu.cuda import seconds
    from on_gpu.network import Training

    training = Training(size, rows)
    speaker.say(nbytes=training.nbytes, bus=bus_speed())
    ckpt = rekindle.Checkpointer(
        Path(disk) / "run", training.state, memory=memory, snapshot_every=1, persist_every=10**9, strict=True
    )
    ckpt.restore()
    _window(training.update, 3, None, 0)
    step, longest = _until_saved(ckpt, training.update, 3)
    speaker.say(until=step, first=longest)
    counted = len(ckpt.metrics.stalls)
    plain, saved, before = [], [], ckpt.metrics.saves
    for _ in range(rounds):
        plain.append(_window(training.update, steps, None, 0))
        saved.append(_window(training.update, steps, ckpt.step, step + 1))
        step += steps
    complete(ckpt)
    speaker.say(steps=rounds * steps, saves=ckpt.metrics.saves - before)
    stalls = list(ckpt.metrics.stalls)[counted:]
    training.update()
    step += 1

    def whole() -> None:
        ckpt.step(step)
        complete(ckpt)

    speaker.say(in_memory=seconds(whole), step=step, raw={"plain": plain, "saved": saved, "stalls": stalls})
    newest = ckpt.latest()
    speaker.say(newest=newest.step if newest is not None else 0, fingerprint=training.fingerprint())


def restore_training(speaker: Speaker, memory: str, disk: str, size: int, close: bool) -> None:
    import rekindle
    from on_gpu.cuda import seconds
    from on_gpu.network import Training

    training = Training(size, 8)
    ckpt = rekindle.Checkpointer(Path(disk) / "run", training.state, memory=memory, persist_every=10**9)
    took = seconds(ckpt.restore)
    speaker.say(seconds=took, step=ckpt.metrics.restored_step, source=ckpt.metrics.restored_from)
    speaker.say(fingerprint=training.fingerprint())
    if close:
        ckpt.close()


# -- the first steps, and launches ------------------------------------------------------------------------------


def first_step(
    report: Report,
    places: Places,
    *,
    size: int = 16 * GIB,
    device: str = "cuda",
    limit: int | None = None,
    patience: float = 60.0,
) -> None:
    """``limit``: of memory for snapshots, in bytes. ``patience``: seconds that the first snapshot gets."""
    import rekindle
    from on_gpu.cuda import synchronize
    from on_gpu.network import counting_state

    parameters, optimizer = counting_state(size, device=device)
    root = Path(places.disk) / "run"
    state, own = {"parameters": parameters, "optimizer": optimizer}, {"memory": places.memory, "memory_limit": limit}
    ckpt = rekindle.Checkpointer(root, state, **own, snapshot_every=1, persist_every=10**9, overlap=True)
    ckpt.restore()
    times, updates = [], []
    first, of_step, step, began = None, 0, 0, time.perf_counter()
    while step < 10 or (first is None and time.perf_counter() - began < min(patience, report.left)):
        step += 1
        before = time.perf_counter()
        optimizer.step()
        updates.append(time.perf_counter() - before)
        if first is None and (held := snapshots_in_memory(root, places.memory)):
            first, of_step = time.perf_counter() - began, max(held)
        synchronize()
        before = time.perf_counter()
        ckpt.step(step)
        times.append(time.perf_counter() - before)
        time.sleep(0.05)
    within = f"within {time.perf_counter() - began:.0f} s; {ckpt.metrics.summary()}"
    report.require(first is not None, f"a snapshot went into memory ({within})")
    report.raw("seconds", {"step()": times, "update": updates})
    report.figure("longest step() of the first ten", max(times[:10]) * 1e3, "ms", high=20)
    report.figure("longest wait before an update", max(updates[:10]) * 1e3, "ms")
    report.figure("first step with a snapshot", of_step)
    report.figure("first snapshot", first or 0.0, "s after the first step")


def launch_bound(report: Report, places: Places) -> None:
    """Several thousand launches a step, of next to nothing each: the interpreter is what the loop waits for."""
    import torch

    import rekindle

    torch.manual_seed(1)
    model = torch.nn.Sequential(*(torch.nn.Linear(256, 256, device="cuda") for _ in range(128)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=False)
    batch = torch.randn(8, 256, device="cuda")

    def update() -> None:
        optimizer.zero_grad(set_to_none=True)
        model(batch).square().mean().backward()
        optimizer.step()

    state = {"model": model, "optimizer": optimizer}
    ckpt = rekindle.Checkpointer(
        Path(places.disk) / "run", state, memory=places.memory, snapshot_every=1, persist_every=10**9, strict=True
    )
    ckpt.restore()
    for _ in range(3):
        update()
    with ckpt.guard(watchdog=False):
        step, _ = _until_saved(ckpt, update, 5)
    steps, plain, saved, before = 20, [], [], ckpt.metrics.saves
    for _ in range(5):
        if report.left < 8:
            break
        plain.append(_window(update, steps, None, 0))
        with ckpt.guard(watchdog=False):
            saved.append(_window(update, steps, ckpt.step, step + 1))
        step += steps
    report.raw("seconds a step", {"plain": plain, "saved": saved})
    saves, wanted = ckpt.metrics.saves - before, steps * len(saved)
    report.require(saves == wanted > 0, f"a snapshot of each of {wanted} steps: {saves}")
    base, slow = statistics.median(plain), statistics.median(saved)
    report.figure("step without guard and snapshots", base * 1e3, "ms")
    report.figure("slower by", 100 * (slow / base - 1), "%", high=2)
    report.figure("snapshots", ckpt.metrics.saves, "saves")


# -- the state that only one rank has ---------------------------------------------------------------------------


def local_state(report: Report, places: Places) -> None:
    """Two steps at a time, with the host ahead of the device; then both states in memory are compared."""
    import torch

    import rekindle
    from on_gpu.cuda import spin
    from rekindle.memory.job_dir import JobDir, memory_base
    from rekindle.memory.local_state import read_local_files

    model = torch.nn.Sequential(*(torch.nn.BatchNorm1d(64) for _ in range(400))).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    root = Path(places.disk) / "run"
    state = {"model": model, "optimizer": optimizer}
    ckpt = rekindle.Checkpointer(root, state, memory=places.memory, snapshot_every=10**6, persist_every=10**9)
    ckpt.restore()
    job = JobDir.of(root, memory_base(places.memory))
    live: dict[int, dict[str, torch.Tensor]] = {}
    compared, torn, late = 0, 0, 0
    with ckpt.guard(watchdog=False):
        for step in range(1, 201):
            optimizer.zero_grad(set_to_none=True)
            model(torch.randn(32, 64, device="cuda")).square().mean().backward()
            optimizer.step()
            spin(0.002)
            live[step] = {f"model.{name}": buffer.clone() for name, buffer in model.named_buffers()}
            ckpt.step(step)
            if step % 2:
                continue
            files = _newest(lambda: read_local_files(job.paths, 0), step)
            late += files is None or files.newest is None or files.newest[1] != step
            for found in files.states if files is not None else []:
                if found.stamp.step in live:
                    compared += 1
                    torn += not _equal(files.plan, found, live[found.stamp.step])
            live.clear()
            if report.left < 3:
                break
    report.require(compared > 0, "a state in memory was compared with the live one")
    report.figure("steps compared", compared, "steps", low=100)
    report.figure("torn", torn, "steps", high=0)
    report.figure("not there within 2 s", late, "steps", high=0)


def _newest(read: Callable[[], Any], step: int) -> Any:
    """Returns the files of local states, once that of ``step`` is there, or after 2 s."""
    deadline = time.monotonic() + 2
    while True:
        files = read()
        newest = files.newest if files is not None else None
        if (newest is not None and newest[1] >= step) or time.monotonic() > deadline:
            return files
        time.sleep(0.005)


def _equal(plan: Any, state: Any, live: dict[str, Any]) -> bool:
    """True if all buffers in ``state`` are those of ``live``."""
    from rekindle.format.layout import BLOCK
    from rekindle.memory.local_state import padded

    names, sizes, block = {}, {}, 0
    for chunk in plan.layout.chunks:
        names[block], sizes[block] = chunk.name, chunk.nbytes
        block += -(-chunk.nbytes // BLOCK)
    at, seen = 0, 0
    for number in plan.blocks:
        buffer = live.get(names[number])
        if buffer is not None:
            seen += 1
            data = bytes(state.tensors[at : at + sizes[number]])
            if data != buffer.cpu().numpy().tobytes():
                return False
        at += padded(sizes[number])
    if seen != len(live):
        raise RuntimeError(f"{seen} buffers are in the local state, of {len(live)}")
    return True
