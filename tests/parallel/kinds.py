"""Every kind of parallelism: how to build a job of that kind on this rank, and how it makes a step.

A ``Part`` is what one rank has. Everything is on the CPU, over gloo.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tests.parallel.models import Model, batch, param_groups, stage

__all__ = ["KINDS", "Part", "build", "kinds_on"]

EVERY = (1, 2, 3, 4)
KINDS: dict[str, tuple[int, ...]] = {
    "single": (1,),
    "ddp": EVERY,
    "fsdp2": EVERY,
    "hsdp": (2, 4),
    "tp": EVERY,
    "fsdp2+tp": EVERY,
    "pipeline": (2, 4),
    "fsdp1": EVERY,
    "fsdp1-orig": EVERY,
    "zero1": EVERY,
}
"""Each kind, and the numbers of ranks that it is run on."""

_GRID = {1: (1, 1), 2: (2, 1), 3: (1, 3), 4: (2, 2)}
"""fsdp2+tp: ranks that share the data, times ranks that share each layer."""


def kinds_on(world: int) -> list[str]:
    """Kinds that run on so many ranks."""
    return [kind for kind, worlds in KINDS.items() if world in worlds]


@dataclass
class Part:
    """What one rank has of a job."""

    kind: str
    bare: nn.Module
    """The model as its author wrote it; its names are those of the truth."""
    model: nn.Module
    """As it is wrapped: what the job trains and gives to its checkpoints."""
    optimizer: Any
    scheduler: torch.optim.lr_scheduler.LambdaLR
    forward_backward: Callable[[int], float | None]
    """Gradients of a step's data. Returns this rank's part of the loss, None if others have it."""

    def step(self, number: int) -> float | None:
        """One step of training; ``number`` says with which data."""
        self.optimizer.zero_grad()
        loss = self.forward_backward(number)
        self.optimizer.step()
        self.scheduler.step()
        return loss


def build(kind: str, world: int, seed: int = 0, wrong: bool = False) -> Part:
    """This rank's part of a new job. ``wrong`` gives its optimizer settings that a restore must replace."""
    torch.manual_seed(seed)
    bare = Model()
    rank = dist.get_rank() if dist.is_initialized() else 0
    wrapped, run = _WRAP[kind](bare, rank, world)
    groups = param_groups(wrapped, wrong)
    if kind == "zero1":
        from torch.distributed.optim import ZeroRedundancyOptimizer

        optimizer: Any = ZeroRedundancyOptimizer(groups, torch.optim.AdamW, lr=1e-3)
    else:
        optimizer = torch.optim.AdamW(groups)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 10))
    return Part(kind, bare, wrapped, optimizer, scheduler, run)


Run = Callable[[int], float | None]
Wrapped = tuple[nn.Module, Run]


def _loss(scores: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(scores.flatten(0, 1), target.flatten())


def _with_data(model: nn.Module, part: int, parts: int) -> Wrapped:
    """A model that takes words and gives scores, trained with one of ``parts`` parts of each step's data."""

    def run(step: int) -> float:
        words, target = batch(step, part, parts)
        loss = _loss(model(words), target)
        loss.backward()
        return loss.item()

    return model, run


def _single(model: Model, rank: int, world: int) -> Wrapped:
    return _with_data(model, 0, 1)


def _ddp(model: Model, rank: int, world: int) -> Wrapped:
    return _with_data(_in_ddp(model), rank, world)


def _in_ddp(model: nn.Module, group: Any = None) -> nn.Module:
    from torch.nn.parallel import DistributedDataParallel

    # Looking for unused parameters keeps the buckets as they are after the first step of each start: with more than two
    # ranks the order of a sum, and so its last bit, depends on where in a bucket a gradient lies.
    return DistributedDataParallel(model, process_group=group, bucket_cap_mb=0.01, find_unused_parameters=True)


def _fsdp2(model: Model, rank: int, world: int) -> Wrapped:
    from torch.distributed.device_mesh import init_device_mesh

    _fully_shard(model, init_device_mesh("cpu", (world,)))
    return _with_data(model, rank, world)


def _hsdp(model: Model, rank: int, world: int) -> Wrapped:
    from torch.distributed.device_mesh import init_device_mesh

    _fully_shard(model, init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "shard")))
    return _with_data(model, rank, world)


def _fully_shard(model: Model, mesh: Any) -> None:
    from torch.distributed.fsdp import fully_shard

    for block in model.blocks.values():
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


def _tp(model: Model, rank: int, world: int) -> Wrapped:
    from torch.distributed.device_mesh import init_device_mesh

    _in_layers(model, init_device_mesh("cpu", (world,)))
    return _with_data(model, 0, 1)


def _fsdp2_tp(model: Model, rank: int, world: int) -> Wrapped:
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", _GRID[world], mesh_dim_names=("data", "layer"))
    _in_layers(model, mesh["layer"])
    _fully_shard(model, mesh["data"])
    return _with_data(model, mesh.get_local_rank("data"), _GRID[world][0])


def _in_layers(model: Model, mesh: Any) -> None:
    """Each layer's work is shared. What is not named stays whole on every rank."""
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    plan: dict[str, Any] = {"head": ColwiseParallel(output_layouts=Replicate())}
    for name in model.blocks:
        plan |= {f"blocks.{name}.{layer}": ColwiseParallel() for layer in ("q", "k", "v")}
        plan[f"blocks.{name}.up"] = ColwiseParallel(
            use_local_output=False
        )  # parts of unequal width need their name tag
        plan |= {f"blocks.{name}.{layer}": RowwiseParallel() for layer in ("out", "down")}
    parallelize_module(model, mesh, plan)


def _pipeline(model: Model, rank: int, world: int) -> Wrapped:
    """Two stages; on four ranks there are two pipelines, and each stage is averaged over both."""
    pipes = world // 2
    number, pipe = divmod(rank, pipes)
    other = pipe + (1 - number) * pipes
    part: nn.Module = stage(model, number)
    groups = [dist.new_group([s * pipes + p for p in range(pipes)]) for s in (0, 1)]
    if pipes > 1:
        part = _in_ddp(part, groups[number])

    def run(step: int) -> float | None:
        words, target = batch(step, pipe, pipes)
        if number == 0:
            out = part(words)
            dist.send(out.detach().contiguous(), other)
            dist.recv(grad := torch.empty_like(out), other)
            out.backward(grad)
            return None
        dist.recv(x := torch.empty(*words.shape, _width(model)), other)
        loss = _loss(part(x.requires_grad_()), target)
        loss.backward()
        dist.send(x.grad, other)
        return loss.item()

    return part, run


def _width(model: Model) -> int:
    assert isinstance(model.head, nn.Linear)
    return model.head.in_features


def _fsdp1(orig: bool) -> Callable[[Model, int, int], Wrapped]:
    def wrap(model: Model, rank: int, world: int) -> Wrapped:
        from torch.distributed.fsdp import FullyShardedDataParallel

        how: dict[str, Any] = {"device_id": torch.device("cpu"), "use_orig_params": orig}
        model.anchor = FullyShardedDataParallel(model.anchor, **how)  # frozen ones can't be flattened with others
        for name, block in list(model.blocks.items()):
            model.blocks[name] = FullyShardedDataParallel(block, **how)
        return _with_data(FullyShardedDataParallel(model, **how), rank, world)

    return wrap


_WRAP: dict[str, Callable[[Model, int, int], Wrapped]] = {
    "single": _single,
    "ddp": _ddp,
    "fsdp2": _fsdp2,
    "hsdp": _hsdp,
    "tp": _tp,
    "fsdp2+tp": _fsdp2_tp,
    "pipeline": _pipeline,
    "fsdp1": _fsdp1(orig=False),
    "fsdp1-orig": _fsdp1(orig=True),
    "zero1": _ddp,
}
