"""One contender of ``stall.py`` in a process of its own: it trains, saves or loads, and writes down what that cost.

Started by ``stall.py`` as ``python contender.py '<json of Task>'``.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import signal
import statistics
import sys
import threading
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
import xxhash
from machine import evict, fsync_tree
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

import rekindle

__all__ = ["CONTENDERS", "LOADS", "Task"]

_LAYERS = 12
_KEEP = 2
"""Checkpoints that stay on disk; Rekindle's default, and the others are tidied to the same."""


@dataclass(frozen=True)
class Task:
    """What one process is to do. Travels as JSON."""

    contender: str
    load: str | None
    """A key of LOADS; None to save."""
    size: int
    saves: int
    """Saves after the first."""
    compute: float
    threads: int
    settle: float
    target: str
    result: str
    fingerprint: str = ""
    """Of the state that a load must give."""


# -- training -----------------------------------------------------------------------------------------------------


class Training:
    """A transformer and AdamW, whose parameters and two moments take ``size`` bytes, and something to compute."""

    def __init__(self, size: int, compute: float) -> None:
        parameters = size // 12  # float32: the parameter and two moments
        width = 8
        while _LAYERS * (12 * (width + 8) ** 2 + 13 * (width + 8)) <= 0.75 * parameters:
            width += 8
        blocks = [torch.nn.TransformerEncoderLayer(width, 8, 4 * width) for _ in range(_LAYERS)]
        rows = max(1, (parameters - sum(p.numel() for block in blocks for p in block.parameters())) // width)
        self.model = torch.nn.Sequential(torch.nn.Embedding(rows, width), *blocks)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, fused=True)
        for parameter in self.model.parameters():
            parameter.grad = torch.randn_like(parameter)
        self._a, self._b = torch.randn(1024, 1024), torch.randn(1024, 1024)
        self._repeats = 1
        self._repeats = max(1, round(compute / statistics.median(self.compute() for _ in range(20))))

    def compute(self) -> float:
        """Seconds that the same piece of work took: a step's forward and backward, as far as time is concerned."""
        began = time.perf_counter()
        for _ in range(self._repeats):
            torch.mm(self._a, self._b)
        return time.perf_counter() - began

    def update(self) -> float:
        """Change every byte of the state. Seconds that others made the update wait, in hooks on the optimizer."""
        began = time.perf_counter()
        started = [began]
        # Registered last, so it runs after all hooks that wait.
        handle = self.optimizer.register_step_pre_hook(lambda *_: started.append(time.perf_counter()))
        try:
            self.optimizer.step()
        finally:
            handle.remove()
        return started[-1] - began

    def tensors(self) -> list[torch.Tensor]:
        parameters = list(self.model.parameters())
        state = [value for p in parameters for _, value in sorted(self.optimizer.state.get(p, {}).items())]
        return [t.detach() for t in [*parameters, *state]]

    def state_dict(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def fingerprint(self) -> str:
        """Hash of all bytes of the state, taken in place."""
        digest = xxhash.xxh3_128()
        for tensor in self.tensors():
            digest.update((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr()))
        return digest.hexdigest()


class Floor:
    """The least that securing a state can cost: one copy of as many bytes, in one go, into memory that is there."""

    def __init__(self, size: int) -> None:
        self._from, self._to = torch.ones(size // 4), torch.ones(size // 4)

    def seconds(self) -> float:
        samples = []
        for _ in range(3):
            began = time.perf_counter()
            self._to.copy_(self._from)
            samples.append(time.perf_counter() - began)
        return statistics.median(samples)


# -- contenders ---------------------------------------------------------------------------------------------------


class TorchSave:
    """``torch.save`` to a file. It doesn't sync, so ``finish`` does."""

    def __init__(self, training: Training, root: Path) -> None:
        self.training, self.root = training, root
        root.mkdir(exist_ok=True)

    @staticmethod
    def path_of(root: Path, step: int) -> Path:
        return root / f"{step}"

    def path(self, step: int) -> Path:
        return self.path_of(self.root, step)

    def save(self, step: int) -> None:
        """What the training loop calls, and is blocked by."""
        torch.save(self.training.state_dict(), self.path(step))

    def ready(self) -> None:
        """Wait until the state may change again."""

    def finish(self, step: int) -> None:
        """Wait, in another thread, until the bytes of ``step`` are on the disk."""
        fsync_tree(self.path(step))

    def tidy(self, step: int) -> None:
        """Remove a surplus checkpoint, outside of all that is timed."""
        old = self.path(step - _KEEP)
        if old.is_dir():
            shutil.rmtree(old)
        else:
            old.unlink(missing_ok=True)

    def helpers(self) -> list[int]:
        """Processes that work for this contender."""
        return []

    def close(self) -> None:
        pass


class DcpSave(TorchSave):
    """``dcp.save``. It syncs its files but not the directories, so ``finish`` does that."""

    def save(self, step: int) -> None:
        dcp.save(self.training.state_dict(), checkpoint_id=self.path(step))


class DcpAsync(TorchSave):
    """``dcp.async_save`` as it comes: a copy into new memory inside of the call, written by a thread."""

    def save(self, step: int) -> None:
        self.upload = dcp.async_save(self.training.state_dict(), checkpoint_id=self.path(step))

    def finish(self, step: int) -> None:
        self.upload.result()
        super().finish(step)


class DcpStager(DcpAsync):
    """``dcp.async_save`` with a stager that is kept: its thread copies into shared memory that is used again.

    Nothing in torch stops an update while that copy runs; the caller has to wait, as ``ready`` does.
    """

    def __init__(self, training: Training, root: Path) -> None:
        super().__init__(training, root)
        self.stager = DefaultStager(
            StagingOptions(
                use_pinned_memory=False, use_shared_memory=True, use_async_staging=True, use_non_blocking_copy=False
            )
        )

    def save(self, step: int) -> None:
        response = dcp.async_save(self.training.state_dict(), checkpoint_id=self.path(step), async_stager=self.stager)
        self.staging, self.upload = response.staging_completion, response.upload_completion

    def ready(self) -> None:
        self.staging.result()

    def close(self) -> None:
        self.stager.close()


class Rekindle(TorchSave):
    """A save into memory; the agent carries it to the disk and syncs it there."""

    def __init__(self, training: Training, root: Path) -> None:
        super().__init__(training, root)
        state = {"model": training.model, "optimizer": training.optimizer}
        self.checkpointer = rekindle.Checkpointer(root, state, keep=_KEEP, strict=True)
        self.checkpointer.restore()

    @staticmethod
    def path_of(root: Path, step: int) -> Path:
        return root / f"step-{step:010d}"

    def save(self, step: int) -> None:
        self.checkpointer.save(step)

    def finish(self, step: int) -> None:
        while not (self.path(step) / "checkpoint.json").exists():  # it is written last, everything else being synced
            time.sleep(0.002)

    def tidy(self, step: int) -> None:
        pass  # the agent does it

    def helpers(self) -> list[int]:
        status = Path(os.environ["REKINDLE_MEMORY"]).glob("rekindle-*/*/agent.json")
        return [json.loads(path.read_bytes())["pid"] for path in status]

    def close(self) -> None:
        self.checkpointer.close()


CONTENDERS: dict[str, type[TorchSave]] = {
    "torch.save": TorchSave,
    "dcp.save": DcpSave,
    "dcp.async_save": DcpAsync,
    "dcp.async_save, stager kept": DcpStager,
    "rekindle": Rekindle,
}


# -- saving -------------------------------------------------------------------------------------------------------


def _status(pid: int | str, field: str) -> int:
    """A size from /proc/PID/status, in bytes."""
    text = Path(f"/proc/{pid}/status").read_text()
    return next(int(line.split()[1]) * 1024 for line in text.splitlines() if line.startswith(f"{field}:"))


def run_saves(task: Task) -> dict[str, Any]:
    """First save and later ones, each of a state that has changed, the one before it being durable."""
    training = Training(task.size, task.compute)
    began = time.perf_counter()
    contender = CONTENDERS[task.contender](training, Path(task.target))
    setup = time.perf_counter() - began
    training.compute()  # the first step, at the end of which AdamW makes its state
    training.update()
    floor = Floor(task.size)
    before = _status("self", "RssAnon") + _status("self", "RssFile")
    Path("/proc/self/clear_refs").write_text("5")  # from here on counts the high-water mark of resident memory
    samples = [_save(training, contender, floor, step, task.settle) for step in range(1, task.saves + 2)]
    memory = {
        "peak": _status("self", "VmHWM") - before + sum(_status(pid, "RssAnon") for pid in contender.helpers()),
        "shared": _status("self", "RssShmem"),
    }
    result = {
        "state_bytes": sum(t.nbytes for t in training.tensors()),
        "tensors": len(training.tensors()),
        "setup": setup,
        "memory": memory,
        "samples": samples,
    }
    if isinstance(contender, Rekindle):
        # Killed rather than closed, so that its memory is left for a successor to restore from.
        _write(task, result)
        os.kill(os.getpid(), signal.SIGKILL)
    contender.close()
    return result


def _settle(limit: float) -> float:
    """Wait until the machine has little else to do, ``limit`` seconds at most. The share of it that was idle last."""
    deadline = time.monotonic() + limit
    while True:
        before = _cpu_times()
        time.sleep(0.25)
        spent = [after - earlier for after, earlier in zip(_cpu_times(), before, strict=True)]
        idle = (spent[3] + spent[4]) / max(sum(spent), 1)
        if idle >= 0.9 or time.monotonic() > deadline:
            return idle


def _cpu_times() -> list[int]:
    return [int(ticks) for ticks in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]]


def _save(training: Training, contender: TorchSave, floor: Floor, step: int, settle: float) -> dict[str, Any]:
    """One save with training before, during and after it, until it is durable. Seconds."""
    idle = _settle(settle)
    quiet = statistics.median(training.compute() for _ in range(3))
    copy = floor.seconds()
    fingerprint = training.fingerprint()
    durable: list[float] = []

    def watch() -> None:
        contender.finish(step)
        durable.append(time.perf_counter())

    watcher = threading.Thread(target=watch, name="bench-watch")
    began = time.perf_counter()
    contender.save(step)
    call = time.perf_counter() - began
    watcher.start()
    computing = [training.compute()]
    blocked = time.perf_counter()
    contender.ready()
    wait = time.perf_counter() - blocked + training.update()
    while watcher.is_alive():
        computing.append(training.compute())
    watcher.join()
    if not durable:
        raise SystemExit(f"{type(contender).__name__}: step {step} was not written")
    contender.tidy(step)
    return {
        "step": step,
        "idle_before": idle,
        "fingerprint": fingerprint,
        "floor": copy,
        "call": call,
        "wait": wait,
        "stall": call + wait,
        "step_longer": call + wait + computing[0] - quiet,
        "durable": durable[0] - began,
        "lost": call + wait + sum(computing) - len(computing) * quiet,
    }


# -- loading ------------------------------------------------------------------------------------------------------


def _load_torch(training: Training, path: Path) -> float:
    began = time.perf_counter()
    state = torch.load(path)
    training.model.load_state_dict(state["model"])
    training.optimizer.load_state_dict(state["optimizer"])
    return time.perf_counter() - began


def _load_dcp(training: Training, path: Path) -> float:
    training.update()  # dcp loads into tensors that exist, so AdamW must have made its state
    began = time.perf_counter()
    state = training.state_dict()
    dcp.load(state, checkpoint_id=path)  # straight into the live tensors, so the model needs no load_state_dict()
    training.optimizer.load_state_dict(state["optimizer"])
    return time.perf_counter() - began


def _load_rekindle(place: str) -> Callable[[Training, Path], float]:
    def load(training: Training, path: Path) -> float:
        state = {"model": training.model, "optimizer": training.optimizer}
        began = time.perf_counter()
        checkpointer = rekindle.Checkpointer(path.parent, state, keep=_KEEP, strict=True)
        checkpointer.restore()
        seconds = time.perf_counter() - began
        checkpointer.close()
        if checkpointer.metrics.restored_from != place:
            raise SystemExit(f"restored from {checkpointer.metrics.restored_from}, not from {place}")
        return seconds

    return load


LOADS: dict[str, tuple[str, Callable[[Training, Path], float]]] = {
    "torch.load": ("torch.save", _load_torch),
    "dcp.load": ("dcp.save", _load_dcp),
    "dcp.load of async_save": ("dcp.async_save", _load_dcp),
    "dcp.load of async_save, stager kept": ("dcp.async_save, stager kept", _load_dcp),
    "rekindle, memory": ("rekindle", _load_rekindle("memory")),
    "rekindle, storage": ("rekindle", _load_rekindle("storage")),
}
"""Ways to load, each with the contender that wrote what it reads. Loading what the asynchronous ones wrote takes as
long as loading any other; it is done to see that they wrote the state as it was at the save."""


def run_load(task: Task) -> dict[str, Any]:
    """Load the last checkpoint twice: not in the page cache, as far as that can be had, and in it. Verified."""
    name, load = LOADS[str(task.load)]
    path = CONTENDERS[name].path_of(Path(task.target), task.saves + 1)
    training = Training(task.size, task.compute)
    evict(path)
    result: dict[str, Any] = {}
    for cache in ("cold", "warm"):
        result[cache] = load(training, path)
        if training.fingerprint() != task.fingerprint:
            raise SystemExit(f"{task.load}: the loaded state is not the one that was saved")
        training.update()  # so that the second load has something to do
    return {**result, "floor": Floor(task.size).seconds()}


# -- the process --------------------------------------------------------------------------------------------------


def _write(task: Task, result: dict[str, Any]) -> None:
    Path(task.result).write_text(json.dumps(result))


def main() -> None:
    warnings.filterwarnings("ignore", module="torch.distributed.checkpoint")
    task = Task(**json.loads(sys.argv[1]))
    torch.set_num_threads(task.threads)
    _write(task, run_load(task) if task.load else run_saves(task))


if __name__ == "__main__":
    main()
