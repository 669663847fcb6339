"""A small sharded training: ``train.py --root ROOT``, as schedulers start it. Ranks write what they do into $TOLD.

It goes no further than to the step that $LIMIT has, so that a fault always strikes before the end.
"""

from __future__ import annotations

import argparse
import hashlib
import logging
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import rekindle

STEPS = 60


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--root")
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    dist.init_process_group("gloo")
    train(parser.parse_args().root)
    dist.destroy_process_group()


def alone(rank: int, world: int, place: Path) -> None:
    """A rank of a run that has no Checkpointer, and no fault."""
    dist.init_process_group("gloo", init_method=f"file://{place}/met", rank=rank, world_size=world)
    os.environ["TOLD"] = str(place / "told")
    train(None)
    dist.destroy_process_group()


def train(root: str | None) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 48), nn.Tanh(), nn.Dropout(0.1), nn.Linear(48, 5))
    for layer in (model[0], model[3], model):
        fully_shard(layer)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(dist.get_rank())  # data and dropout are each rank's own
    ckpt = rekindle.Checkpointer(root, {"model": model, "optimizer": optimizer}) if root else None
    start = ckpt.restore() if ckpt else 0
    _tell("begun", os.environ.get("SLURMD_NODENAME", "-"), os.getpid(), start)
    if ckpt is None:
        for _ in range(STEPS):
            _update(model, optimizer)
    else:
        with ckpt, ckpt.guard():
            for step in range(start + 1, STEPS + 1):
                with ckpt.pause_watchdog("the test has the word"):
                    while step > int(Path(os.environ["LIMIT"]).read_text() or 0):
                        _tell("safe", ckpt.metrics.node_safe_step)
                        time.sleep(0.05)
                _update(model, optimizer)
                ckpt.step(step)
                _tell("did", step)
                time.sleep(0.02)
    _tell("ended", _digest(model, optimizer))


def _update(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.randn(8, 16)).square().mean().backward()
    optimizer.step()


def _digest(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """Digest of all bits that this rank has: of parameters, of the optimizer, of the random generator."""
    found = hashlib.sha256(torch.get_rng_state().numpy().tobytes())
    for parameter in model.parameters():
        for tensor in (parameter, *optimizer.state[parameter].values()):
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            found.update(local.detach().numpy().tobytes())
    return found.hexdigest()


def _tell(*words: object) -> None:
    with Path(os.environ["TOLD"]).open("a") as file:
        file.write(" ".join(map(str, (words[0], dist.get_rank(), *words[1:]))) + "\n")


if __name__ == "__main__":
    main()
