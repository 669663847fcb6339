"""One rank of a training: notes each step with a digest of its state, and kills itself where the task says so."""

# ruff: noqa: E402

import os
import sys

WARM = "torch" in sys.modules  # before this script has imported it

import hashlib
import json
import signal
import time
from pathlib import Path

import torch
import torch.distributed as dist

import rekindle

TASK = json.loads(sys.argv[1])
HERE = Path(TASK["place"])
WITHIN = 120.0
"""Seconds for which the first kill waits, until the launcher has a process for warm starts."""


def shard(model: torch.nn.Sequential) -> None:
    """Shards by FSDP2, which has moved twice. Where torch's own needs a GPU, by tensor parallel: DTensors, too."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    try:
        from torch.distributed.fsdp import fully_shard
    except ImportError:  # before torch 2.6
        from torch.distributed._composable.fsdp import fully_shard
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    if TASK["kind"] == "tensor parallel":
        parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
        return
    for part in (model[0], model[2], model):
        fully_shard(part, mesh=mesh)


def build(kind: str) -> tuple:
    """Returns the model, what is called to train it, and its optimizer."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.GELU(), torch.nn.Linear(16, 16))
    called = model
    if kind in ("fsdp2", "tensor parallel"):
        shard(model)
    elif kind == "ddp":
        called = torch.nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)  # buckets stay alike
    elif kind == "compiled":
        called = torch.compile(model)
    return model, called, torch.optim.AdamW(model.parameters(), lr=1e-2)


def digest(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> str:
    moments = [value for each in optimizer.state.values() for value in each.values()]
    total = hashlib.sha256(torch.get_rng_state().numpy().tobytes())
    for tensor in (*model.state_dict().values(), *moments):
        total.update(getattr(tensor, "_local_tensor", tensor).detach().contiguous().numpy().tobytes())
    return total.hexdigest()[:16]


def note(rank: int, **what: object) -> None:
    with open(HERE / f"trace-{rank}.jsonl", "a") as trace:
        trace.write(json.dumps({"pid": os.getpid(), "at": time.time(), **what}) + "\n")


def kill_here(step: int, rank: int) -> None:
    """Ends this rank, once at each such step."""
    if rank not in TASK["kills"].get(str(step), ()):
        return
    mark = HERE / f"killed-{step}-{rank}"
    if mark.exists():
        return
    until = time.monotonic() + WITHIN
    while TASK["warm"] and not (HERE / "warm").exists():
        assert time.monotonic() < until, "no process for warm starts came"
        time.sleep(0.05)
    if len(TASK["kills"][str(step)]) > 1:
        dist.barrier()  # all of them, at once
    mark.touch()
    time.sleep(TASK["lingers"])  # the others come to this step, too, and wait for this rank
    os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model, called, optimizer = build(TASK["kind"])
    torch.manual_seed(100 + rank)
    state = {"model": model, "optimizer": optimizer}
    ckpt = rekindle.Checkpointer(HERE / "root", state, **TASK["options"])
    first = ckpt.restore()
    note(rank, event="start", warm=WARM, restored=first, place=ckpt.metrics.restored_from)
    with ckpt.guard(watchdog=3 * WITHIN) as guard:  # to wait for a warm process is no hang
        assert guard.connected(60), "no agent"
        for step in range(first + 1, TASK["steps"] + 1):
            optimizer.zero_grad()
            loss = called(torch.randn(4, 16)).square().mean()
            kill_here(step, rank)
            loss.backward()
            optimizer.step()
            note(rank, event="step", step=step, digest=digest(model, optimizer))
            ckpt.step(step)
    ckpt.close(timeout=60)
    note(rank, event="end")
    dist.destroy_process_group()


main()
