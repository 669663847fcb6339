"""``guard(fence=True)``: ranks wait for each other before updates that all of them make, and before no others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import rekindle
from tests.parallel.launch import on_ranks

STEPS = 4


def test_updating_on_one_rank_alone_waits_for_nobody(root: Path, memory: Path) -> None:
    """Rank 0 averages weights by hand, before and after the collectives of a step."""
    for answer in on_ranks(2, _averaging, root, memory, timeout=300.0):
        assert answer["steps"] == STEPS and answer["barriers"] == STEPS, answer.value


def test_updating_on_all_ranks_is_fenced_where_no_optimizer_announces_updates(root: Path, memory: Path) -> None:
    for answer in on_ranks(2, _by_hand, root, memory, timeout=300.0):
        assert answer["steps"] == STEPS and answer["barriers"] == STEPS, answer.value


# -- what runs on a rank --------------------------------------------------------------------------------------------


def _begin(root: Path, memory: Path, **state: Any) -> tuple[rekindle.Checkpointer, list[int]]:
    """A checkpointer that counts what it waits for other ranks before."""
    ckpt = rekindle.Checkpointer(root, state, memory=memory, snapshot_every=1000)
    ckpt.restore()
    barriers: list[int] = []
    wait = ckpt._group.barrier
    ckpt._group.barrier = lambda: (barriers.append(1), wait())[1]  # type: ignore[method-assign]
    return ckpt, barriers


def _averaging(rank: int, world: int, root: Path, memory: Path) -> dict[str, Any]:
    import torch
    from torch.nn.parallel import DistributedDataParallel

    torch.manual_seed(0)
    model, average = torch.nn.Linear(8, 8), torch.zeros(8, 8)
    wrapped, optimizer = DistributedDataParallel(model), torch.optim.AdamW(model.parameters())
    ckpt, barriers = _begin(root, memory, model=model, optimizer=optimizer)

    def average_on_rank_0() -> None:
        if rank == 0:
            with ckpt.updating():
                average.lerp_(model.weight.detach(), 0.1)

    with ckpt.guard(fence=True):
        for step in range(1, STEPS + 1):
            average_on_rank_0()
            wrapped(torch.full((4, 8), rank + 1.0)).sum().backward()
            optimizer.step()
            average_on_rank_0()
            ckpt.step(step)
    ckpt.close(timeout=60)
    return {"steps": ckpt._saver.reached, "barriers": len(barriers)}


def _by_hand(rank: int, world: int, root: Path, memory: Path) -> dict[str, Any]:
    import torch

    torch.manual_seed(0)
    model = torch.nn.Linear(8, 8)
    ckpt, barriers = _begin(root, memory, model=model)
    with ckpt.guard(fence=True):
        for step in range(1, STEPS + 1):
            with ckpt.updating(), torch.no_grad():
                model.weight.mul_(0.9)
            ckpt.step(step)
    ckpt.close(timeout=60)
    return {"steps": ckpt._saver.reached, "barriers": len(barriers)}
