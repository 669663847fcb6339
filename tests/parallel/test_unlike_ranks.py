"""Ranks that do not have what the others think they have: no checkpoint comes of it that can't be restored.

Either the others notice and each rank saves all that it has, or the step is refused by name and the one before it
stands.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import rekindle
from tests.parallel.cells import PLACES
from tests.parallel.jobs import Stores, state_of
from tests.parallel.launch import Answer, on_ranks

GOOD, ODD = 2, 3
"""The last step at which the ranks are alike, and one at which they aren't."""


def one_more(part: Any) -> None:
    """A parameter that the wrapper has never seen, large enough to shift everybody's part of the work."""
    import torch

    part.bare.surprise = torch.nn.Parameter(torch.ones(300, 300))


def one_less(part: Any) -> None:
    """An optimizer that has forgotten what it keeps of one parameter."""
    del part.optimizer.state[part.bare.blocks["0"].up.weight]


def another_dtype(part: Any) -> None:
    """An optimizer that keeps something in half the bits."""
    import torch

    kept = part.optimizer.state[part.bare.blocks["0"].up.weight]
    kept["exp_avg"] = kept["exp_avg"].to(torch.bfloat16)


CASES: dict[str, tuple[str, Callable[[Any], None], str]] = {
    "a parameter more": ("ddp", one_more, "ddp"),
    "optimizer state less": ("ddp", one_less, "ddp"),
    "less of what is sharded": ("fsdp2", one_less, "fsdp2"),
    "another dtype of what is sharded": ("fsdp2", another_dtype, "single"),
}
"""What saves, what one of its ranks does, and what is to be restored."""


@pytest.mark.parametrize(
    "case",
    [
        "a parameter more",
        pytest.param("less of what is sharded", marks=pytest.mark.campaign(seconds=17)),
        pytest.param("optimizer state less", marks=pytest.mark.campaign),
        pytest.param("another dtype of what is sharded", marks=pytest.mark.campaign),
    ],
)
def test_ranks_that_become_unlike(case: str, tmp_path: Path, memory: Path) -> None:
    kind, _, reader = CASES[case]
    stores = Stores.under(tmp_path, memory)
    for answer in on_ranks(2, becoming_unlike, case, stores):
        assert answer["error"] in ("", "NotDurableError"), answer["message"]
    for place in PLACES:
        copy = Stores.under(tmp_path, memory)
        copy.take(stores, place)
        world = 2 if reader == kind else 1
        for answer in on_ranks(world, coming_back, reader, copy, stores.root.parent, grouped=world > 1):
            check_that_it_stands(answer, place)
        copy.remove()
    stores.remove()


def check_that_it_stands(answer: Answer, place: str) -> None:
    """A step that was saved, with every bit of it; or an error that says what is the matter."""
    if answer["error"]:
        assert answer["error"] in rekindle.errors.__all__
        assert "surprise" in answer["message"] or "blocks.0.up.weight" in answer["message"], answer["message"]
        return
    assert answer["step"] in (GOOD, ODD) and answer["place"] == place
    assert answer["different"] == []


def test_ranks_that_are_unlike_from_the_start(tmp_path: Path, memory: Path) -> None:
    """Tensors of other shapes by the same names: nothing is committed that a restore could take for a checkpoint."""
    stores = Stores.under(tmp_path, memory)
    saved = on_ranks(2, unlike_from_the_start, stores)
    assert any(answer.error or answer["error"] for answer in saved)
    for answer in saved:
        if answer["error"]:
            assert answer["error"] in rekindle.errors.__all__ and "up.weight" in answer["message"], answer["message"]
    for rows in (18, 20):
        (answer,) = on_ranks(1, reading_one, rows, stores, grouped=False)
        assert answer["error"] in ("CorruptError", "StateMismatchError") or answer["step"] == 0, answer.value
    stores.remove()


# -- what runs on a rank --------------------------------------------------------------------------------------------


def becoming_unlike(rank: int, world: int, case: str, stores: Stores) -> dict[str, Any]:
    import torch

    from tests.parallel.kinds import build

    kind, change, _ = CASES[case]
    part = build(kind, world)
    ckpt = rekindle.Checkpointer(stores.root, state_of(part, rank=rank, seen=0), memory=stores.memory)
    for step in range(1, GOOD + 1):
        part.step(step)
        ckpt.save(step, wait="durable", timeout=30)
    keep(part, stores.root.parent / f"truth-{GOOD}.pt", rank)
    part.step(ODD)
    keep(part, stores.root.parent / f"truth-{ODD}.pt", rank)
    if rank == 1:
        change(part)
    answer = {"error": "", "message": ""}
    try:
        ckpt.save(ODD, wait="durable", timeout=2)
    except Exception as error:
        answer = {"error": type(error).__name__, "message": str(error)}
    torch.distributed.barrier()  # both have said what they have to say
    return answer


def keep(part: Any, path: Path, rank: int) -> None:
    import torch

    from tests.parallel.truth import gather

    whole = gather(part)
    if rank == 0:
        torch.save(whole, path)


def coming_back(rank: int, world: int, kind: str, stores: Stores, truths: Path) -> dict[str, Any]:
    import torch

    from tests.parallel.kinds import build
    from tests.parallel.truth import differences, gather

    part = build(kind, world, seed=99, wrong=True)
    ckpt = rekindle.Checkpointer(stores.root, state_of(part, rank=-1, seen=-1), memory=stores.memory)
    try:
        step = ckpt.restore()
    except Exception as error:
        return {"error": type(error).__name__, "message": str(error)}
    found = {"error": "", "message": "", "step": step, "place": ckpt.metrics.restored_from, "different": []}
    whole = gather(part)
    if rank == 0 and step:
        found["different"] = differences(torch.load(truths / f"truth-{step}.pt"), whole)
    return found


def unlike_from_the_start(rank: int, world: int, stores: Stores) -> dict[str, Any]:
    import torch
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = torch.nn.ModuleDict({"up": torch.nn.Linear(24, 18 + 2 * rank, bias=False)})
    try:
        fully_shard(model["up"])
        ckpt = rekindle.Checkpointer(stores.root, {"model": model}, memory=stores.memory)
        until = time.monotonic() + 60  # for the agent to find out, which has more to do than one save's wait
        while True:
            try:
                ckpt.save(1, wait="durable", timeout=2)
                break
            except rekindle.NotDurableError as error:
                if "up.weight" in str(error) or time.monotonic() > until:
                    raise
    except Exception as error:
        return {"error": type(error).__name__, "message": str(error)}
    return {"error": "", "message": ""}


def reading_one(rank: int, world: int, rows: int, stores: Stores) -> dict[str, Any]:
    """The same as one process, of one of the two shapes."""
    import torch

    model = torch.nn.ModuleDict({"up": torch.nn.Linear(24, rows, bias=False)})
    ckpt = rekindle.Checkpointer(stores.root, {"model": model}, memory=stores.memory)
    try:
        return {"error": "", "step": ckpt.restore()}
    except Exception as error:
        return {"error": type(error).__name__, "message": str(error)}
