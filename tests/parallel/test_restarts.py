"""One job that comes back again and again as another one, in the same place, its agent alive all the while."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import rekindle
from rekindle.cli.operations import stop
from tests.parallel.cells import TOLERANCE
from tests.parallel.jobs import Stores, state_of
from tests.parallel.launch import on_ranks

STARTS = (("fsdp2", 3, ""), ("tp", 2, "memory"), ("fsdp1", 4, "memory"), ("single", 1, "storage"), ("ddp", 2, "memory"))
"""Kind and ranks of each start, and where it finds what the one before has saved."""
STEPS = 2
"""Of each start."""


@pytest.mark.campaign(seconds=18)
def test_a_job_that_changes_its_shape_at_each_start(tmp_path: Path, memory: Path) -> None:
    stores = Stores.under(tmp_path, memory)
    whole = on_ranks(1, training, grouped=False)[0]["losses"]
    for number, (kind, ranks, place) in enumerate(STARTS):
        if place == "storage":
            stop(stores.job, 30.0, lambda status: None)
            assert not stores.job.path.exists()
        answers = on_ranks(ranks, starting, number, stores, grouped=kind != "single")
        for answer in answers:
            assert answer["step"] == number * STEPS and answer["place"] == place
        assert answers[0]["different"] == []
        losses = [answer["losses"] for answer in answers if answer["losses"]]
        for step, want in enumerate(whole[number * STEPS : (number + 1) * STEPS]):
            mean = sum(some[step] for some in losses) / len(losses)
            assert abs(mean - want) <= TOLERANCE * want
    stores.remove()


# -- what runs on a rank --------------------------------------------------------------------------------------------


def training(rank: int, world: int) -> dict[str, Any]:
    """All steps in one go, without any checkpoint."""
    from tests.parallel.kinds import build

    part = build("single", 1)
    return {"losses": [part.step(step) for step in range(1, len(STARTS) * STEPS + 1)]}


def starting(rank: int, world: int, number: int, stores: Stores) -> dict[str, Any]:
    """Go on from what is there, leave what is reached in memory, and die."""
    import torch

    from tests.parallel.kinds import build
    from tests.parallel.truth import differences, gather

    part = build(STARTS[number][0], world, seed=number, wrong=number > 0)
    ckpt = rekindle.Checkpointer(stores.root, state_of(part, rank=rank, seen=0), memory=stores.memory)
    start = ckpt.restore()
    found: dict[str, Any] = {"step": start, "place": ckpt.metrics.restored_from, "different": [], "losses": []}
    truth = stores.root.parent / "truth.pt"
    whole = gather(part) if number else {}
    if rank == 0 and number:
        found["different"] = differences(torch.load(truth), whole)
    for step in range(start + 1, start + STEPS + 1):
        loss = part.step(step)
        ckpt.step(step)
        found["losses"] += [loss] if loss is not None else []
    whole = gather(part)
    if rank == 0:
        torch.save(whole, truth)
    ckpt.save(start + STEPS, wait="memory")
    return found


def test_what_is_a_ranks_own_comes_from_its_own_shard_however_far_that_is(tmp_path: Path, memory: Path) -> None:
    """The copy of one rank's shard in memory is damaged: its own state is on storage, the other rank's is nearer."""
    stores = Stores.under(tmp_path, memory)
    on_ranks(2, leaving_its_own, stores)
    shard = next(stores.job.path.glob("step-*/shard-00001-of-00002.safetensors"))
    raw = shard.read_bytes()
    shard.write_bytes(raw[:-1] + bytes([raw[-1] ^ 1]))
    assert [answer["own"] for answer in on_ranks(2, having_its_own, stores)] == [[0.0, 0.0], [1.0, 1.0]]
    stores.remove()


def leaving_its_own(rank: int, world: int, stores: Stores) -> dict[str, Any]:
    import torch

    values = rekindle.Values(own=torch.full((2,), float(rank)))
    rekindle.Checkpointer(stores.root, shared_and(values), memory=stores.memory).save(1, wait="durable")
    return {}


def having_its_own(rank: int, world: int, stores: Stores) -> dict[str, Any]:
    values = rekindle.Values()
    assert rekindle.Checkpointer(stores.root, shared_and(values), memory=stores.memory).restore() == 1
    return {"own": values.own.tolist()}


def shared_and(values: rekindle.Values) -> dict[str, Any]:
    """With a model of which each rank saves a part, so that each needs the other's shard too."""
    import torch
    from torch.nn.parallel import DistributedDataParallel

    return {"model": DistributedDataParallel(torch.nn.Linear(64, 64)), "values": values}
