"""A training job over a loader, which may die by SIGKILL at any moment of a step; and what it has written down."""

from __future__ import annotations

import hashlib
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

import rekindle
from rekindle.data import Resumable
from tests.data.kinds import TWO, Indexed, resumable, seed_all
from tests.fork_server import context

MOMENTS = ("fetched", "updated", "saved")


@dataclass(frozen=True)
class Job:
    """One start of a job."""

    out: Path
    """Gets a line for each step, and one at the end."""
    kind: str = "generator"
    exact: Any = "replay"
    steps: int = 12
    root: Path | None = None
    """None trains without a Checkpointer."""
    memory: Path | None = None
    die: tuple[int, str] | None = None
    """Step and moment at which this rank kills itself."""
    rank: int = 0
    world: int = 1
    rendezvous: str = ""

    def start(self) -> Any:
        """Starts a process for it."""
        process = context.Process(target=_train_by_kind, args=(self,))
        process.start()
        return process

    def written(self) -> tuple[dict[int, str], str]:
        """Returns each step's loss, the same in all starts that came to it, and the end's digest."""
        losses: dict[int, str] = {}
        digest = ""
        for line in self.out.read_text().splitlines():
            what, value = line.split()
            if what == "done":
                digest = value
            else:
                assert losses.setdefault(int(what), value) == value, f"step {what} was another one after a restart"
        return losses, digest


def _train_by_kind(job: Job) -> None:
    if job.world == 1:
        train(job, resumable(job.kind, job.exact))
        return
    where = f"file://{job.rendezvous}"
    dist.init_process_group("gloo", init_method=where, rank=job.rank, world_size=job.world)
    train(job, lambda: _shared(job))


def _shared(job: Job) -> Resumable:
    """A loader of this rank's part of a dataset."""
    sampler = DistributedSampler(Indexed(), num_replicas=job.world, rank=job.rank)
    return Resumable(DataLoader(Indexed(), batch_size=2, sampler=sampler, **TWO), job.exact)


def train(job: Job, make: Callable[[], Any]) -> None:
    """Trains on epoch after epoch, to the last step of the job."""
    torch.set_num_threads(1)
    seed_all(0)
    data = make()
    model: Any = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 1))
    model = DistributedDataParallel(model) if job.world > 1 else model
    optimizer = torch.optim.AdamW(model.parameters())
    seed_all(job.rank)
    ckpt, step = None, 0
    if job.root is not None:
        state = {"model": model, "optimizer": optimizer, "data": data}
        ckpt = rekindle.Checkpointer(job.root, state, memory=job.memory)
        step = ckpt.restore()
    out = os.open(job.out, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    while step < job.steps:
        for batch in data:
            _maybe_die(job, step + 1, "fetched")
            loss = model(_inputs(batch)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            _maybe_die(job, step, "updated")
            if ckpt is not None:
                ckpt.step(step)
            os.write(out, f"{step} {loss.item().hex()}\n".encode())
            _maybe_die(job, step, "saved")
            if step == job.steps:
                break
    total = hashlib.sha256(torch.rand(4).numpy().tobytes())  # the next random numbers, too
    for tensor in [*model.state_dict().values(), *(t for kept in optimizer.state.values() for t in kept.values())]:
        total.update(tensor.detach().contiguous().numpy().tobytes())
    os.write(out, f"done {total.hexdigest()}\n".encode())
    if ckpt is not None:
        ckpt.close(timeout=60)


def _inputs(batch: Any) -> torch.Tensor:
    """The numbers in a batch, in rows of four."""
    if isinstance(batch, dict):
        batch = batch["x"]
    elif isinstance(batch, list):
        (batch,) = batch
    return batch.float().reshape(-1, 4)


def _maybe_die(job: Job, step: int, moment: str) -> None:
    if job.die == (step, moment):
        os.kill(os.getpid(), signal.SIGKILL)
