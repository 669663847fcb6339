"""FullyShardedDataParallel with the original parameters, restored, trained on, and saved again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import rekindle
from tests.parallel.launch import on_ranks


def layers() -> Any:
    import torch

    torch.manual_seed(3)
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Linear(16, 8))


def counters(model: Any, optimizer: Any) -> list[float | None]:
    """Returns the updates that the optimizer has counted for each parameter; None for one that it has no state of."""
    kept = [optimizer.state.get(parameter, {}).get("step") for parameter in model.parameters()]
    return [None if step is None else float(step) for step in kept]


def training_on(rank: int, world: int, place: Path) -> dict[str, Any]:
    """Goes on for two steps from wherever the run is."""
    import torch
    from torch.distributed.fsdp import FullyShardedDataParallel

    model = FullyShardedDataParallel(layers(), device_id=torch.device("cpu"), use_orig_params=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    with rekindle.Checkpointer(place / "run", {"model": model, "optimizer": optimizer}, memory="/proc/none") as ckpt:
        done = ckpt.restore()
        for step in (done + 1, done + 2):
            optimizer.zero_grad()
            model(torch.ones(4, 8)).square().mean().backward()
            optimizer.step()
            ckpt.save(step, wait="durable", timeout=60)
    return {"counters": counters(model, optimizer)}


@pytest.mark.campaign(seconds=15)
def test_a_restart_leaves_no_counters_of_parameters_that_are_on_other_ranks(tmp_path: Path) -> None:
    """They would stand still, and another number of ranks could not tell which rank's is right."""
    import torch

    on_ranks(2, training_on, tmp_path)
    for answer in on_ranks(2, training_on, tmp_path):
        assert None in answer["counters"] and set(answer["counters"]) == {None, 4.0}
    model = layers()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    with rekindle.Checkpointer(tmp_path / "run", {"model": model, "optimizer": optimizer}, memory="/proc/none") as ckpt:
        assert ckpt.restore() == 4
    assert counters(model, optimizer) == [4.0] * 4
