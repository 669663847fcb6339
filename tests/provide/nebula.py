"""Checkpoints of torch_nebula for tests: made, looked at, carried to storage."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from rekindle.agent.file_drain import FileDrainer
from rekindle.provide import torch_nebula as tn

__all__ = ["is_ok", "same", "save", "settle", "state", "tags"]


def state(seed: int) -> dict[str, torch.Tensor]:
    return {"weight": torch.arange(1000.0) + seed, "step": torch.tensor(seed)}


def same(found: dict[str, torch.Tensor], seed: int) -> bool:
    return all(torch.equal(found[name], value) for name, value in state(seed).items())


def save(tag: str, seed: int = 0, *names: str) -> None:
    checkpoint = tn.Checkpoint(tag, -2)
    for name in names or ("model.pt", "optim.pt"):
        checkpoint.save(name, state(seed))
    assert checkpoint.commit() is True


def tags(root: Path) -> list[str]:
    return sorted(os.listdir(root)) if root.exists() else []


def is_ok(root: Path, tag: str) -> bool:
    path = root / tag / "complete.txt"
    return path.exists() and path.read_bytes() == b"OK"


def settle(drainer: FileDrainer) -> None:
    """Carries all that can be carried."""
    while drainer.tick():
        pass
