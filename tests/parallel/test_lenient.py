"""``restore(partial=True)``: what fits is loaded, what doesn't is left as it was and named."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.parallel.cells import PLACES
from tests.parallel.jobs import SAVED, Saved, Stores, state_of
from tests.parallel.launch import on_ranks


def test_what_does_not_fit_is_left_and_named(
    saved_by: Callable[[str, int], Saved], tmp_path: Path, memory: Path
) -> None:
    saved = saved_by("fsdp2", 2)
    for kind, ranks, place in zip(("tp", "single"), (3, 1), PLACES, strict=True):
        stores = Stores.under(tmp_path, memory)
        stores.take(saved.stores, place)
        answers = on_ranks(ranks, loading, kind, stores, saved.truth, grouped=kind != "single")
        assert answers[0]["different"] == ["model.surprise: is too much"]
        for answer in answers:
            assert answer["missing"].startswith(f"rank {ranks - 1}: parameters are" if ranks > 1 else "parameters are")
            assert "lost.param_groups[0]: float32[3]." in answer["missing"]
            assert answer["strict"].startswith("StateMismatchError") and "model.surprise" in answer["strict"]
            assert answer["step"] == SAVED
            assert answer["surprise"] == [3.0, 3.0, 3.0] and answer["kept"]
        table = next(line for line in answers[0]["said"] if "restored in part" in line)
        assert "  left as it was (1):\n    model.surprise" in table
        assert "  skipped, not in the live state (1):\n    'scheduler'" in table
        stores.remove()


# -- what runs on a rank --------------------------------------------------------------------------------------------


def loading(rank: int, world: int, kind: str, stores: Stores, truth: Path) -> dict[str, Any]:
    """A job that has a parameter more, and no schedule."""
    import torch

    import rekindle
    from tests.parallel.kinds import build
    from tests.parallel.truth import differences, gather

    part = build(kind, world, seed=99, wrong=True)
    part.bare.surprise = torch.nn.Parameter(torch.full((3,), 3.0))
    before = part.scheduler.state_dict()
    state = {name: entry for name, entry in state_of(part, rank=-1, seen=-1).items() if name != "scheduler"}
    found: dict[str, Any] = {"strict": "", "missing": "", "said": []}
    lost = torch.optim.SGD([torch.nn.Parameter(torch.zeros(3))], lr=1.0)
    try:  # one rank alone has it, and all ranks say so
        rekindle.Checkpointer(stores.root, state | {"lost": lost} if rank == world - 1 else state, memory=stores.memory)
    except rekindle.UsageError as error:
        found["missing"] = str(error)
    ckpt = rekindle.Checkpointer(stores.root, state, memory=stores.memory)
    try:
        ckpt.restore()
    except Exception as error:
        found["strict"] = f"{type(error).__name__}: {error}"
    handler = logging.Handler()
    handler.emit = lambda record: found["said"].append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("rekindle").addHandler(handler)
    found["step"] = ckpt.restore(partial=True)
    whole = gather(part)
    del (want := torch.load(truth))["scheduler"]
    if rank == 0:
        found["different"] = differences(want, {name: held for name, held in whole.items() if name != "scheduler"})
    return found | {"surprise": part.bare.surprise.tolist(), "kept": part.scheduler.state_dict() == before}
