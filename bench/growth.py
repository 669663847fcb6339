"""Measures the cost of a save as the work grows: in tensors, in bytes, in ranks, in saves that came before."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import xxhash
from contenders import wait_for_memory
from task import Task
from training import Copies

import rekindle

__all__ = ["run_bytes", "run_history", "run_ranks", "run_tensors"]

Tell = Callable[[dict[str, Any]], object]

_SNAPSHOTS_ONLY = 10**9
"""A ``persist_every`` out of reach: no drain runs beside what is measured."""


class Flat:
    """``count`` parameters of ``size`` bytes in all, and plain gradient descent. No step of work lies between updates,
    so that a save's copy has nothing to hide behind: what is measured is the most that it can stall.
    """

    def __init__(self, count: int, size: int) -> None:
        each = max(1, size // count // 4)
        self.model = torch.nn.ParameterList(torch.randn(each) for _ in range(count))
        for parameter in self.model:
            parameter.grad = torch.ones_like(parameter)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3, foreach=True)
        self.nbytes = count * each * 4

    def checkpointer(self, root: Path, **settings: Any) -> rekindle.Checkpointer:
        state = {"model": self.model, "optimizer": self.optimizer}
        return rekindle.Checkpointer(root, state, snapshot_every=1, strict=True, **settings)

    def save(self, checkpointer: rekindle.Checkpointer, step: int) -> dict[str, float]:
        """Save, and change everything. Seconds that each of them stalled."""
        began = time.perf_counter()
        checkpointer.step(step)
        call = time.perf_counter() - began
        ended = []
        handle = self.optimizer.register_step_pre_hook(lambda *_: ended.append(time.perf_counter()))
        began = time.perf_counter()
        self.optimizer.step()
        handle.remove()
        return {"call": call, "wait": ended[0] - began}

    def fingerprint(self) -> str:
        digest = xxhash.xxh3_128()
        for parameter in self.model:
            digest.update(memoryview(parameter.detach().numpy()))
        return digest.hexdigest()


def _cost(flat: Flat, root: Path, repeats: int, overlap: bool) -> list[dict[str, float]]:
    """Of each of ``repeats`` saves after the first two."""
    checkpointer = flat.checkpointer(root, overlap=overlap, persist_every=_SNAPSHOTS_ONLY)
    checkpointer.restore()
    wait_for_memory(checkpointer)
    costs = [flat.save(checkpointer, step) for step in range(1, repeats + 3)]
    checkpointer.save(repeats + 3)
    checkpointer.close()
    return costs[2:]


def _verify(flat: Flat, root: Path) -> float:
    """Load the newest checkpoint from storage, and compare. Seconds of the load."""
    saved = flat.fingerprint()
    with torch.no_grad():
        for parameter in flat.model:
            parameter.zero_()
    began = time.perf_counter()
    checkpointer = flat.checkpointer(root)
    checkpointer.restore()
    seconds = time.perf_counter() - began
    checkpointer.close()
    if flat.fingerprint() != saved:
        raise SystemExit(f"{len(flat.model)} tensors: the loaded state is not the one that was saved")
    return seconds


def _point(task: Task, count: int, size: int) -> dict[str, Any]:
    flat, root = Flat(count, size), Path(task.target)
    root.mkdir(exist_ok=True)
    copies = Copies(flat.nbytes)
    floors = [copies.faulted()]
    point: dict[str, Any] = {"tensors": count, "bytes": flat.nbytes}
    for name, overlap in (("overlapped", True), ("at_once", False)):
        point[name] = _cost(flat, root / f"{count}-{size}-{name}", task.count, overlap)
        floors.append(copies.faulted())
    point["load"] = _verify(flat, root / f"{count}-{size}-at_once")
    return {**point, "floors": floors}


def run_tensors(task: Task, tell: Tell) -> None:
    """Over ``more["counts"]`` tensors of ``size`` bytes in all."""
    tell({"points": [_point(task, count, task.size) for count in task.more["counts"]]})


def run_bytes(task: Task, tell: Tell) -> None:
    """``size`` bytes in 256 tensors: a process for each size, so that none is left with what another one has freed."""
    tell(_point(task, 256, task.size))


def run_ranks(task: Task, tell: Tell) -> None:
    """One of several ranks, all of which save the same state at the same time: ``size`` bytes in all of them."""
    world = int(task.more["world"])
    root = Path(task.target)
    if world > 1:
        meeting = f"file://{root.parent}/rendezvous-{world}"
        rank = int(os.environ["RANK"])
        torch.distributed.init_process_group("gloo", init_method=meeting, rank=rank, world_size=world)
    torch.manual_seed(0)
    flat = Flat(256, task.size // world)
    checkpointer = flat.checkpointer(root, persist_every=_SNAPSHOTS_ONLY)
    checkpointer.restore()
    wait_for_memory(checkpointer)
    costs = []
    for step in range(1, task.count + 3):
        if world > 1:
            torch.distributed.barrier()
        costs.append(flat.save(checkpointer, step))
    found = {"bytes": checkpointer.metrics.bytes_saved // checkpointer.metrics.saves, "costs": costs[2:]}
    checkpointer.close()
    if world > 1:
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()
    tell(found)


def run_history(task: Task, tell: Tell) -> None:
    """``count`` saves of a small state, each of which becomes durable and stays, before the next one."""
    flat, root = Flat(64, task.size), Path(task.target)
    checkpointer = flat.checkpointer(root, keep=task.count + 1, persist_seconds=0)
    checkpointer.restore()
    wait_for_memory(checkpointer)
    samples = []
    for step in range(1, task.count + 1):
        began = time.perf_counter()
        cost = flat.save(checkpointer, step)
        _wait(root / f"step-{step:010d}" / "checkpoint.json", began + 120)
        samples.append({**cost, "durable": time.perf_counter() - began})
    kept = len(list(root.glob("step-*/checkpoint.json")))
    if kept != task.count:
        raise SystemExit(f"{kept} checkpoints of {task.count} are there")
    checkpointer.close()
    tell({"bytes": flat.nbytes, "samples": samples})


def _wait(path: Path, until: float) -> None:
    while not path.exists():
        if time.perf_counter() > until:
            raise SystemExit(f"{path.parent.name} is not durable after two minutes")
        time.sleep(0.001)
