"""Measures the costs of parts whose figures the documents quote: ``python bench/costs.py``. Linux only.

Medians. Nothing here is compared with others: these are the floors and prices that decisions rest on.
"""

from __future__ import annotations

import os
import select
import signal
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import click
import torch
import xxhash
from rich.console import Console
from rich.table import Table

import rekindle
from rekindle.agent.process import Process
from rekindle.memory.job_dir import JobDir, memory_base
from rekindle.memory.paths import JobPaths
from rekindle.memory.status import StatusPage
from rekindle.memory.thirds import Thirds
from rekindle.save.gate import Gate
from rekindle.save.plan import Unit
from rekindle.save.witness import Witness

_SHM = "/dev/shm"
_GB = 10**9


def _each(what: Callable[[], object], count: int = 5000, rounds: int = 7) -> float:
    """Median seconds of one call."""
    found = []
    for _ in range(rounds):
        began = time.perf_counter()
        for _ in range(count):
            what()
        found.append((time.perf_counter() - began) / count)
    return statistics.median(found)


def _pages(place: Path) -> Iterator[tuple[str, str]]:
    page = StatusPage(place / "page", 1)
    yield "status page: a write", f"{_each(page.write) * 1e6:.2f} us"
    gate, step = Gate(page, 0), iter(range(1, 10**9))

    def one_step() -> None:
        gate.updating(-1)
        gate.stepping(-1)
        gate.stable(next(step), -1)

    yield "guard: all that a step writes on the page", f"{_each(one_step) * 1e6:.2f} us"
    process = Process(os.getpid())
    yield "agent: a look at one process", f"{_each(process.look) * 1e6:.2f} us"
    process.close()


def _small_state(place: Path) -> Iterator[tuple[str, str]]:
    """Times a step without a snapshot, guarded and not, for a model of 50 layers with BatchNorm."""
    layers = [layer for _ in range(50) for layer in (torch.nn.Linear(64, 64), torch.nn.BatchNorm1d(64))]
    model = torch.nn.Sequential(*layers)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(8, 64)).sum().backward()
    optimizer.step()
    state = {"model": model, "optimizer": optimizer}
    ckpt = rekindle.Checkpointer(place / "run", state, memory=place, snapshot_every=10**9)
    steps = iter(range(1, 10**9))
    ckpt.save(next(steps))
    plain = _each(lambda: ckpt.step(next(steps)), 500)
    with ckpt.guard(watchdog=False):
        guarded = _each(lambda: ckpt.step(next(steps)), 500)
    ckpt.close()
    tensors = sum(1 for _ in model.state_dict()) + sum(len(kept) for kept in optimizer.state.values())
    text = f"{plain * 1e6:.0f} us, in guard() {guarded * 1e6:,.0f} us"
    yield f"step() without a snapshot, {tensors} tensors, {len(list(model.buffers()))} buffers", text


def _small_snapshots(place: Path) -> Iterator[tuple[str, str]]:
    """10 MB of parameters and moments, saved behind ``step()`` and inside of it, 20 ms of rest before each update."""
    parameters = torch.nn.ParameterList(torch.randn(14_000) for _ in range(60))
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer = torch.optim.AdamW(parameters, foreach=True)
    for how, overlap in (("behind step()", True), ("inside of step()", "auto")):
        state = {"parameters": parameters, "optimizer": optimizer}
        ckpt = rekindle.Checkpointer(place / how, state, memory=place, persist_every=10**9, overlap=overlap)
        calls = []
        for step in range(1, 201):
            optimizer.step()
            began = time.perf_counter()
            ckpt.step(step)
            calls.append(time.perf_counter() - began)
            time.sleep(0.02)
        call, stall = statistics.median(calls), statistics.median(ckpt.metrics.stalls)
        ckpt.close()
        text = f"step() {call * 1e3:.2f} ms, with the wait before the update {stall * 1e3:.2f} ms"
        yield f"snapshot of 10 MB in 180 tensors, {how}", text


def _looks(place: Path) -> Iterator[tuple[str, str]]:
    """Looks at many tensors for what changed unannounced, beside the ``step()`` that has two of them."""
    parameters = torch.nn.ParameterList(torch.randn(32_768) for _ in range(256))
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer = torch.optim.AdamW(parameters, foreach=True)
    state = {"parameters": parameters, "optimizer": optimizer}
    ckpt = rekindle.Checkpointer(place / "looks", state, memory=place, snapshot_every=1, persist_every=10**9)
    calls = []
    for step in range(1, 41):
        optimizer.step()
        began = time.perf_counter()
        ckpt.step(step)
        calls.append(time.perf_counter() - began)
        time.sleep(0.2)
    ckpt.close()
    tensors = [tensor for kept in optimizer.state.values() for tensor in kept.values() if tensor.numel() > 1]
    tensors += parameters
    witness = Witness(Unit(tensor, tensor.data_ptr(), 0, tensor.nbytes, 0, tensor) for tensor in tensors)
    look = _each(lambda: witness.look(0, whole=False).read(), 100)
    text = f"{look * 1e6:.0f} us, step() {statistics.median(calls) * 1e6:,.0f} us"
    yield f"look at {len(tensors)} tensors on the host", text


def _third_slots(place: Path) -> Iterator[tuple[str, str]]:
    """What a step of a large state reads while it has two slots."""
    (place / "thirds").mkdir()
    thirds = Thirds(JobPaths(place / "thirds"))
    thirds.ask()
    yield "check whether a drain wants a third slot", f"{_each(thirds.are_asked, 1000) * 1e6:.1f} us"


def _agent(place: Path) -> Iterator[tuple[str, str]]:
    """The agent of a guarded job that saves at each step and keeps all cores busy."""
    work = torch.randn(700, 700)
    model = torch.nn.Linear(512, 512)
    optimizer = torch.optim.AdamW(model.parameters())
    ckpt = rekindle.Checkpointer(place / "root", {"model": model, "optimizer": optimizer}, memory=place)
    ckpt.restore()
    job = JobDir.of(place / "root", memory_base(place))
    taken: list[tuple[float, float]] = []
    with ckpt.guard() as guard:
        if not guard.connected(30):
            raise SystemExit("the agent did not come up")
        for step in range(1, 121):
            until = time.perf_counter() + 0.1
            while time.perf_counter() < until:
                work @ work
            model(work[:, :512]).sum().backward()
            optimizer.step()
            ckpt.step(step)
            if step in (40, 120):  # without its start
                taken.append((time.perf_counter(), _seconds_of(job.agent())))
    ckpt.close()
    (began, before), (ended, after) = taken
    yield "agent beside training on all cores", f"{1e3 * (after - before) / (ended - began):.1f} ms of a core a second"


def _seconds_of(pid: int | None) -> float:
    """Returns the seconds that a process's threads have run."""
    return sum(int((task / "schedstat").read_text().split()[0]) for task in Path(f"/proc/{pid}/task").iterdir()) / 1e9


def _deaths(gigabytes: float) -> Iterator[tuple[str, str]]:
    """SIGKILL of a process with so much memory, until its pidfd and its ``stat`` tell."""
    found: dict[str, list[float]] = {"pidfd": [], "stat": []}
    for how in ("pidfd", "stat") * 5:
        ready, told = os.pipe()
        child = os.fork()
        if child == 0:
            hoard = bytearray(b"x") * int(gigabytes * _GB)
            os.write(told, b"%d" % len(hoard))
            signal.pause()
            os._exit(0)
        os.read(ready, 32)
        fd, process = os.pidfd_open(child), Process(child)
        began = time.perf_counter()
        os.kill(child, signal.SIGKILL)
        if how == "pidfd":
            select.select([fd], [], [])
        else:
            while not process.look().over:
                time.sleep(0.0005)
        found[how].append(time.perf_counter() - began)
        os.waitpid(child, 0)
        process.close()
        for one in (fd, ready, told):
            os.close(one)
    text = ", ".join(f"{how} {statistics.median(times) * 1e3:.1f} ms" for how, times in found.items())
    yield f"death of a process with {gigabytes:g} GB is seen after", text


def _copies(nbytes: int = 512 << 20) -> Iterator[tuple[str, str]]:
    """Pieces, each copied and then hashed, against one copy; both with all threads."""
    source, target = torch.ones(nbytes, dtype=torch.uint8), torch.zeros(nbytes, dtype=torch.uint8)
    workers = len(os.sched_getaffinity(0))
    share = nbytes // workers

    def part(number: int, piece: int) -> None:
        for at in range(number * share, (number + 1) * share, piece):
            stop = min(at + piece, (number + 1) * share)
            target[at:stop].copy_(source[at:stop])
            if piece < share:
                xxhash.xxh3_64_hexdigest(memoryview(target[at:stop].numpy()))

    with ThreadPoolExecutor(workers) as threads:

        def all_parts(piece: int) -> float:
            return _each(lambda: list(threads.map(part, range(workers), [piece] * workers)), 1)

        whole = all_parts(share)
        yield f"one copy of {nbytes >> 20} MiB", f"{nbytes / whole / 1e9:.1f} GB/s"
        for piece in (256 << 10, 1 << 20, 16 << 20):
            yield f"the same in hashed pieces of {piece >> 10} KiB", f"{all_parts(piece) / whole:.2f} copies"


@click.command(help=__doc__)
@click.option("--gigabytes", default=2.0, show_default=True, help="Size of the process that is killed.")
def main(gigabytes: float) -> None:
    table = Table("what", "cost")
    with tempfile.TemporaryDirectory(dir=_SHM, prefix="rekindle-costs-") as name:
        place = Path(name)
        by_place = (_pages, _small_state, _small_snapshots, _looks, _third_slots, _agent)
        for rows in (_deaths(gigabytes), *(rows(place) for rows in by_place), _copies()):
            for row in rows:
                table.add_row(*row)
    Console().print(table)


if __name__ == "__main__":
    main()
