"""A default device that torch makes new tensors on: it is for the training's tensors, not for buffers on the host."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import rekindle
from tests.parallel.launch import on_ranks


class Training:
    def __init__(self, width: int, seed: int) -> None:
        torch.manual_seed(seed)
        self.model = torch.nn.Linear(width, width)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.values = rekindle.Values(x=torch.randn(10), still=torch.randn(4, 3).t())
        self.state = {"model": self.model, "optimizer": self.optimizer, "values": self.values}

    def update(self) -> None:
        for parameter in self.model.parameters():
            parameter.grad = torch.full_like(parameter, 0.5)
        self.optimizer.step()
        self.values.x += 1

    def digest(self) -> list[float]:
        kept = [self.optimizer.state[p]["momentum_buffer"] for p in self.model.parameters()]
        found = [*self.model.parameters(), *kept, self.values.x, self.values.still]
        return [float((t.detach().double().flatten() ** 3).sum()) for t in found]


def _default(how: str) -> AbstractContextManager[object]:
    if how == "context":
        return torch.device("meta")
    torch.set_default_device("meta")
    return nullcontext()


def _train(rank: int, world: int, root: Path, memory: Path, how: str) -> dict[str, Any]:
    training = Training(64, 0)
    with _default(how):
        ckpt = rekindle.Checkpointer(root, training.state, memory=memory, overlap=True, strict=True)
        ckpt.restore()
        with ckpt.guard():
            for step in range(1, 4):
                training.update()
                ckpt.step(step)
        ckpt.close()
    return {"digest": training.digest()}


def _restore(rank: int, world: int, root: Path, memory: Path, how: str) -> dict[str, Any]:
    training = Training(64, 1)
    with _default(how):
        ckpt = rekindle.Checkpointer(root, training.state, memory=memory)
        found = ckpt.restore()
    return {"step": found, "digest": training.digest()}


@pytest.mark.parametrize("how", ["set", "context"])
def test_steps_and_a_restore_under_a_default_device(how: str, root: Path, memory: Path) -> None:
    (trained,) = on_ranks(1, _train, root, memory, how, grouped=False, timeout=120)
    expected = trained["digest"]
    (restored,) = on_ranks(1, _restore, root, memory, how, grouped=False, timeout=120)
    assert restored["step"] == 3 and restored["digest"] == expected


def _together(rank: int, world: int, root: Path, memory: Path, steps: int) -> dict[str, Any]:
    """Two ranks, which agree on when to save, and read what they have in common from storage once for both."""
    training = Training(2200, steps)
    torch.set_default_device("meta")
    mesh = rekindle.replica_groups(copies=2).mesh("cpu")
    wrapper = DistributedDataParallel(training.model)
    ckpt = rekindle.Checkpointer(root, training.state, memory=memory, snapshot_every="1ms")
    found = ckpt.restore()
    for step in range(1, steps + 1):
        training.update()
        ckpt.step(step)
    if steps:
        ckpt.save(steps, wait="durable")
        ckpt.close()
    return {"step": found, "digest": training.digest(), "mesh": mesh.mesh.tolist(), "wrapped": repr(wrapper) != ""}


def test_ranks_agree_and_broadcast_under_a_default_device(root: Path, memory: Path) -> None:
    trained = on_ranks(2, _together, root, memory / "one", 3, timeout=120)
    restored = on_ranks(2, _together, root, memory / "two", 0, timeout=120)
    for before, after in zip(trained, restored, strict=True):
        assert after["step"] == 3 and after["digest"] == before["digest"] and after["mesh"] == [[0], [1]]
