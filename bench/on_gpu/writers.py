"""Trains in each of the ways in which training writes its state, and looks at what the snapshots hold.

Parameters are float32, and every element is the number of updates: a snapshot of step n holds n everywhere. The next
update is queued before the snapshot is waited for.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

from on_gpu.cases import Speaker
from on_gpu.cuda import is_busy, spin, synchronize
from on_gpu.held import snapshots_in_memory, values

__all__ = ["dying_process", "writing_process"]

_SLOW = 0.03
"""Seconds for which a side stream is busy before its update."""
_ALLOCATOR = r"""
#include <cuda_runtime_api.h>
#include <sys/types.h>
extern "C" void* take(ssize_t n, int device, cudaStream_t) { void* p = 0; cudaMalloc(&p, n); return p; }
extern "C" void give(void* p, ssize_t, int, cudaStream_t) { cudaFree(p); }
"""

Update = Callable[[], object]


class _Messages(logging.Handler):
    """Keeps Rekindle's warnings: what is refused must be refused with a message."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []
        logging.getLogger("rekindle").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


class Writer:
    """A state, and the way in which it is written."""

    def __init__(self, name: str, size: int, device: str) -> None:
        self.name, self.device = name, device
        count = 8 if "compiled" in name else 64
        self.model = torch.nn.ParameterList(torch.zeros(size // count // 4, device=device) for _ in range(count))
        options = {name: True} if name in ("foreach", "fused") else {"foreach": False}
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1.0, maximize=True, **options)
        self.state: dict[str, Any] = {"model": self.model, "optimizer": self.optimizer}
        self.ckpt: Any = None
        self.update: Update = self.optimizer.step
        for parameter in self.model:
            parameter.grad = torch.ones_like(parameter)
        if device != "cpu":
            self.side, self.main = torch.cuda.Stream(), torch.cuda.current_stream()

    def prepare(self) -> None:
        """Set up what comes before the Checkpointer."""
        if "captured" in self.name:
            rehearse(self.model, [self.optimizer])
        if "captured before" in self.name:
            self.update = self._replay(capture(self.optimizer.step))
        ways: dict[str, Callable[[], Update]] = {
            "optimizer in backward": self._in_backward,
            "update in backward, step() does nothing": self._behind_a_hook,
            "through .data": lambda: self._past_torch,
            "compiled, reduce-overhead": self._compiled,
        }
        if self.name in ways:
            self.update = ways[self.name]()
        if self.name.startswith("optimizer on a side stream"):
            self.update = self._on_side_stream

    def prepare_after(self, ckpt: Any) -> None:
        """Set up what comes after it."""
        self.ckpt = ckpt
        if "captured after" in self.name:
            self.update = self._replay(capture(self.optimizer.step))
        if self.name == "compiled after, fullgraph":
            self.update = torch.compile(lambda: self.optimizer.step(), fullgraph=True, backend="eager")

    def stream(self) -> Any:
        """Returns the context in which it trains."""
        return torch.cuda.stream(self.side) if self.name == "on a stream of its own" else torch.enable_grad()

    def _replay(self, graph: Any) -> Update:
        def announced() -> None:
            with self.ckpt.updating():
                graph.replay()

        return announced if "updating()" in self.name else graph.replay

    def _in_backward(self) -> Update:
        own = {p: torch.optim.SGD([p], lr=1.0, maximize=True, foreach=False) for p in self.model}
        self.state = {"model": self.model, **{f"o{number}": one for number, one in enumerate(own.values())}}

        def apply(parameter: torch.Tensor) -> None:
            own[parameter].step()
            own[parameter].zero_grad()

        for parameter in self.model:
            parameter.grad = None
            parameter.register_post_accumulate_grad_hook(apply)
        return lambda: sum(p.sum() for p in self.model).backward()

    def _behind_a_hook(self) -> Update:
        def apply(parameter: torch.Tensor) -> None:
            parameter.data.add_(1)  # as a kernel of an extension does: torch counts no new version
            parameter.grad = None

        for parameter in self.model:
            parameter.grad = None
            parameter.register_post_accumulate_grad_hook(apply)

        def update() -> None:
            sum(p.sum() for p in self.model).backward()
            self.optimizer.step()

        return update

    def _past_torch(self) -> None:
        for parameter in self.model:
            parameter.data.add_(1)
        self.optimizer.zero_grad(set_to_none=True)
        self.optimizer.step()

    def _compiled(self) -> Update:
        update = torch.compile(lambda: self.optimizer.step(), mode="reduce-overhead")
        for _ in range(3):
            update()
        with torch.no_grad():
            for parameter in self.model:
                parameter.zero_()
        return update

    def _on_side_stream(self) -> None:
        if "before the next forward" in self.name:
            self.main.wait_stream(self.side)
        self.side.wait_stream(self.main)
        with torch.cuda.stream(self.side):
            spin(_SLOW)
            self.optimizer.step()
        if self.name == "optimizer on a side stream, waited for":
            self.main.wait_stream(self.side)

    def disturb(self) -> None:
        """Give memory of parameters away and take it back, as offloading does."""
        parameters = list(self.model)[:8]
        kept = [p.detach().clone() for p in parameters]
        sizes = [p.untyped_storage().nbytes() for p in parameters]
        for parameter in parameters:
            parameter.untyped_storage().resize_(0)
        others = [torch.full((size // 4,), -1.0, device=self.device) for size in sizes]
        del others
        for parameter, size, value in zip(parameters, sizes, kept, strict=True):
            parameter.untyped_storage().resize_(size)
            parameter.data.copy_(value)


def rehearse(model: Any, optimizers: list[Any]) -> None:
    """Step once on a stream of its own, with gradients of 0, as a capture needs it."""
    for parameter in model:
        parameter.grad.zero_()
    with torch.cuda.stream(torch.cuda.Stream()):
        for optimizer in optimizers:
            optimizer.step()
    torch.cuda.synchronize()
    for parameter in model:
        parameter.grad.fill_(1)


def capture(work: Update) -> Any:
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        work()
    return graph


def use_own_allocator(folder: Path) -> None:
    folder.mkdir(parents=True)
    source, library = folder / "a.cu", folder / "a.so"
    source.write_text(_ALLOCATOR)
    subprocess.run(["nvcc", "-shared", "-Xcompiler", "-fPIC", "-o", str(library), str(source)], check=True)
    allocator = torch.cuda.memory.CUDAPluggableAllocator(str(library), "take", "give")
    torch.cuda.memory.change_current_allocator(allocator)


def writing_process(speaker: Speaker, name: str, memory: str, disk: str, size: int, device: str, steps: int) -> None:
    import rekindle

    messages = _Messages()
    if name == "pluggable allocator":
        use_own_allocator(Path(disk) / "allocator")
    writer = Writer(name, size, device)
    writer.prepare()
    root = Path(disk) / "run"
    ckpt = rekindle.Checkpointer(root, writer.state, memory=memory, snapshot_every=1, persist_every=10**9, overlap=True)
    ckpt.restore()
    ckpt._saver.memory.slots.wait_made(60.0)
    writer.prepare_after(ckpt)
    seen: dict[int, tuple[float, float] | None] = {}
    try:
        _train(writer, ckpt, root, memory, steps, seen)
    except Exception as error:
        messages.lines.append(f"{type(error).__name__}: {str(error).splitlines()[0]}")
    synchronize()
    live = float(min(p.min() for p in writer.model)), float(max(p.max() for p in writer.model))
    speaker.say(seen=list(seen.items()), live=live, failed=ckpt.metrics.failed)
    speaker.say(messages=[line[:300] for line in messages.lines[:3]])


def _train(writer: Writer, ckpt: Any, root: Path, memory: str, steps: int, seen: dict[int, Any]) -> None:
    with writer.stream():
        writer.update()
        ckpt.step(1)
        for n in range(1, steps):
            if writer.name == "freed and given back during the copy":
                writer.disturb()
            writer.update()  # that of n + 1
            synchronize()
            ckpt._saver.conclude()
            held = snapshots_in_memory(root, memory)
            seen[n] = values(held[n], "model.") if n in held else None
            ckpt.step(n + 1)


def dying_process(speaker: Speaker, name: str, memory: str, disk: str, size: int, device: str) -> None:
    """Be a guarded job without snapshots that gets a notice while a replayed update is half done."""
    import rekindle

    model = torch.nn.ParameterList(torch.zeros(size // 64 // 4, device=device) for _ in range(64))
    halves = [torch.optim.SGD(list(model)[i::2], lr=1.0, maximize=True, foreach=False) for i in (0, 1)]
    for parameter in model:
        parameter.grad = torch.zeros_like(parameter)
    spin(0.01)
    rehearse(model, halves)
    state = {"model": model, "a": halves[0], "b": halves[1]}
    root = Path(disk) / "run"
    ckpt = rekindle.Checkpointer(root, state, memory=memory, persist_every=10**9, snapshot_every=10**6, overlap=True)
    ckpt.restore()
    ckpt._saver.memory.slots.wait_made(60.0)

    def in_halves() -> None:
        halves[0].step()
        spin(0.4)
        halves[1].step()

    graph = capture(in_halves)

    def update() -> None:
        with ckpt.updating() if "updating()" in name else nullcontext():
            graph.replay()

    with ckpt.guard(watchdog=False):
        for n in (1, 2, 3):
            update()
            ckpt.step(n)
        torch.cuda.synchronize()
        live = float(model[0][0]), float(model[1][0])
        time.sleep(0.3)
        update()
        time.sleep(0.1)  # the first half is done, the other not begun
        speaker.say(live=live, busy=is_busy())
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(60)
    sys.exit(1)
