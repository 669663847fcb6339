"""The job that is trained in the lab: one rank of it, and what it writes down.

Data come in an order that each rank shuffles anew for each pass, the model has dropout, the optimizer has moments: a
step that is not exactly the one after the restored state has another digest.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["KINDS", "Task", "train"]

KINDS = ("ddp", "hsdp", "fsdp2", "zero1")
_SAMPLES, _BATCH = 24, 4
_FOREVER = 600.0
"""Seconds that are longer than any test."""


@dataclass(frozen=True)
class Task:
    """A training job: what all ranks of all its starts are told."""

    root: str
    traces: str
    """Directory that all nodes and the test see, also when the storage is not mounted."""
    kind: str = "ddp"
    world: int = 2
    steps: int = 30
    pause: float = 0.1
    """Seconds of a forward, beside its work."""
    options: dict[str, Any] = field(default_factory=dict)
    """For the Checkpointer."""
    guard: dict[str, Any] | None = field(default_factory=dict)
    """For ``guard()``; None to train without it."""
    waits_at: int = 0
    """Step after which training goes on once it is safe from the loss of a node."""
    width: int = 32
    """Features of each of the three layers."""
    stands_at: int = 0
    """Step of the first start whose update ranks don't begin, but for those of the lab's first node."""

    def trace(self, rank: int) -> Path:
        return Path(self.traces) / f"rank-{rank}.jsonl"

    def log(self, rank: int) -> Path:
        return Path(self.traces) / f"rank-{rank}.log"


class Trace:
    """Writes lines of JSON, each at once, by the clock that all nodes of a lab share."""

    def __init__(self, task: Task, rank: int) -> None:
        self._file = os.open(task.trace(rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        start = task.trace(rank).read_text().count('"begun"')  # torchrun doesn't count starts for want of a node
        self._always = {"rank": rank, "host": os.uname().nodename, "pid": os.getpid(), "start": start}

    def agree(self, dist: Any) -> None:
        """Takes rank 0's number of this start: others may have missed one, on a node that was lost too soon."""
        number = [self._always["start"]]
        dist.broadcast_object_list(number)
        self._always["start"] = number[0]

    @property
    def is_in_the_first_start(self) -> bool:
        return self._always["start"] == 0

    def say(self, event: str, **more: Any) -> None:
        line = {"t": time.monotonic(), "event": event, **self._always, **more}
        os.write(self._file, (json.dumps(line) + "\n").encode())


def train(task: Task, rank: int) -> None:
    """Trains to the end. The ranks meet as torchrun tells them by the environment."""
    trace = Trace(task, rank)
    trace.say("begun")
    import torch
    import torch.distributed as dist

    import rekindle
    from rekindle.session import nodes

    nodes._ANSWERS_WITHIN = 60.0  # an agent takes its time to start on a machine that has other work
    torch.set_num_threads(1)
    os.dup2(os.open(task.log(rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), 2)
    logging.basicConfig(level=logging.INFO, force=True, format=f"%(asctime)s {os.uname().nodename} %(message)s")
    dist.init_process_group("gloo", rank=rank, world_size=task.world)
    trace.agree(dist)
    trace.say("met")
    state, model = _build(task)
    torch.manual_seed(rank)
    data = torch.randn(_SAMPLES, task.width, generator=torch.Generator().manual_seed(1000 + rank))
    state["data"] = order = rekindle.Values(order=[], at=0)
    ckpt = rekindle.Checkpointer(task.root, state, **{"snapshot_every": 1, **task.options})
    first = ckpt.restore()
    trace.say("restored", step=first, place=ckpt.metrics.restored_from)
    with ExitStack() as stack:
        if task.guard is not None:
            assert stack.enter_context(ckpt.guard(**task.guard)).connected(30), "no agent"
        dist.barrier()
        for step in range(first + 1, task.steps + 1):
            time.sleep(task.pause)
            loss = model(data[_next_batch(order)]).pow(2).mean()
            state["optimizer"].zero_grad()
            loss.backward()
            if step == task.stands_at and trace.is_in_the_first_start and os.uname().nodename != "nodea":
                trace.say("stands")
                time.sleep(_FOREVER)
            state["optimizer"].step()
            digest = _digest(state["model"], order)
            if step == task.waits_at:
                ckpt.save(step, wait="node", timeout=60.0)
            else:
                ckpt.step(step)
            trace.say("step", step=step, digest=digest, safe=ckpt.metrics.node_safe_step)
    ckpt.close(timeout=30)
    trace.say("done")


def _next_batch(order: Any) -> list[int]:
    import torch

    if order.at >= len(order.order):
        order.order, order.at = torch.randperm(_SAMPLES).tolist(), 0
    order.at += _BATCH
    return list(order.order[order.at - _BATCH : order.at])


def _build(task: Task) -> tuple[dict[str, Any], Any]:
    """The state, and what is called to train."""
    import torch
    from torch.nn.parallel import DistributedDataParallel

    torch.manual_seed(0)
    layers = [torch.nn.Linear(task.width, task.width) for _ in range(3)]
    model = torch.nn.Sequential(layers[0], torch.nn.Dropout(0.3), layers[1], torch.nn.ReLU(), layers[2])
    if task.kind in ("hsdp", "fsdp2"):
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        replicas = 2 if task.kind == "hsdp" else 1
        shape = (replicas, task.world // replicas)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
        for part in (*layers, model):
            fully_shard(part, mesh=mesh if replicas > 1 else mesh["shard"])
        return {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=1e-2)}, model
    # Looking for unused parameters keeps the buckets as they are after the first step of each start.
    wrapped = DistributedDataParallel(model, find_unused_parameters=True)
    if task.kind == "zero1":
        from torch.distributed.optim import ZeroRedundancyOptimizer

        optimizer: Any = ZeroRedundancyOptimizer(wrapped.parameters(), torch.optim.AdamW, lr=1e-2)
    else:
        optimizer = torch.optim.AdamW(wrapped.parameters(), lr=1e-2)
    return {"model": wrapped, "optimizer": optimizer}, wrapped


def _digest(model: Any, order: Any) -> str:
    """Digest of what this rank has of the weights, of its generator and of its place in the data."""
    import torch

    total = hashlib.sha256(repr((order.order, order.at)).encode())
    total.update(torch.get_rng_state().numpy().tobytes())
    for tensor in model.state_dict().values():
        total.update(getattr(tensor, "_local_tensor", tensor).detach().contiguous().numpy().tobytes())
    return total.hexdigest()[:16]
