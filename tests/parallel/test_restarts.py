"""One job that comes back again and again as another one, in the same place, its agent alive all the while."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import rekindle
from rekindle.operate import stop
from tests.parallel.cells import TOLERANCE
from tests.parallel.jobs import Stores, state_of
from tests.parallel.launch import on_ranks

STARTS = (("fsdp2", 3, ""), ("tp", 2, "memory"), ("fsdp1", 4, "memory"), ("single", 1, "storage"), ("ddp", 2, "memory"))
"""Kind and ranks of each start, and where it finds what the one before has saved."""
STEPS = 2
"""Of each start."""


def test_a_job_that_changes_its_shape_at_each_start(tmp_path: Path, memory: Path) -> None:
    stores = Stores.under(tmp_path, memory)
    whole = on_ranks(1, training, grouped=False)[0]["losses"]
    for number, (kind, ranks, place) in enumerate(STARTS):
        if place == "storage":
            stop(stores.job, 30.0, False, lambda status: None)
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
