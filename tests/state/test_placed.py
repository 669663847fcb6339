"""Entries that place their tensors themselves: saved by real ranks, each a part, and restored by other numbers of
them."""

from __future__ import annotations

import json
import os
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import rekindle
from rekindle.format.boxes import Box
from rekindle.save.fence import Fence
from rekindle.state.parts import FlatPart
from rekindle.state.placed import PlacedState
from tests.fork_server import context


class Cut(PlacedState):
    """Two tensors, as one rank of some has them: columns of the one, and a run of elements of a block of the other."""

    def __init__(self, rank: int, ranks: int, filled: bool) -> None:
        width = 4 // ranks
        self.columns = torch.zeros(6 * width)
        self.corner, self.size = Box((0, rank * width), (6, width)), 6 * width
        first, last = 10 * rank // ranks, 10 * (rank + 1) // ranks
        self.run, self.span = torch.zeros(last - first), (first, last)
        self.optimizer = torch.optim.SGD([self.columns.requires_grad_(), self.run.requires_grad_()])
        self.values: dict[str, Any] = {"count": 0}
        if filled:
            with torch.no_grad():
                self.columns.copy_(whole()[0][:, rank * width : (rank + 1) * width].flatten())
                self.run.copy_(whole()[1][2:4, 1:].flatten()[first:last])
            self.values = {"count": 3}

    @property
    def optimizers(self) -> Sequence[torch.optim.Optimizer]:
        return [self.optimizer]

    def state_dict(self) -> dict[str, Any]:
        columns = FlatPart(self.columns.detach(), 0, (6, 4), 0, self.size, self.columns, (), self.corner)
        block = Box((0, 0), (2, 5))
        run = FlatPart(self.run.detach(), 0, (2, 5), *self.span, self.run, (), block)
        return {"columns": columns, "run": run, "values": self.values}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.values = state["values"]


def whole() -> tuple[torch.Tensor, torch.Tensor]:
    """The two tensors; the ranks have rows 2 and 3 of the second, without their first column."""
    return torch.arange(24.0).view(6, 4), torch.arange(30.0).view(5, 6)


def _rank(place: Path, rank: int, ranks: int, memory: str, filled: bool) -> None:
    found: Any
    try:
        os.environ |= {"REKINDLE_MEMORY": memory, "LOCAL_WORLD_SIZE": str(ranks)}
        if ranks > 1:
            meeting = place / f"meeting-{filled}"
            dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=ranks)
        cut = Cut(rank, ranks, filled)
        with rekindle.Checkpointer(place / "run", {"cut": cut}) as ckpt:
            found = [ckpt.restore()]
            if filled:
                ckpt.step(1)
        same = Cut(rank, ranks, filled=True)
        found += [torch.equal(cut.columns, same.columns), torch.equal(cut.run, same.run), cut.values["count"]]
    except Exception:
        found = traceback.format_exc()
    (place / f"{rank}.json").write_text(json.dumps(found))


def _run(place: Path, ranks: int, memory: Path, *, filled: bool) -> list[Any]:
    every = [context.Process(target=_rank, args=(place, rank, ranks, str(memory), filled)) for rank in range(ranks)]
    for process in every:
        process.start()
    for process in every:
        process.join(60)
        assert process.exitcode == 0
    return [json.loads((place / f"{rank}.json").read_text()) for rank in range(ranks)]


@pytest.mark.parametrize(("saving", "restoring"), [(2, 1), (1, 2)])
def test_another_number_of_ranks_finds_every_element(saving: int, restoring: int, memory: Path, tmp_path: Path) -> None:
    assert _run(tmp_path, saving, memory, filled=True) == [[0, True, True, 3]] * saving
    assert _run(tmp_path, restoring, memory, filled=False) == [[1, True, True, 3]] * restoring


def test_its_optimizers_hold_updates_back() -> None:
    cut, seen = Cut(0, 1, filled=True), []

    class Waits:
        def wait(self) -> None:
            seen.append("before an update")

    waits, fence = Waits(), Fence({"cut": cut})
    fence.call_before_updates(waits.wait)
    assert fence.lasting() == {id(cut.columns), id(cut.run)}
    cut.optimizer.step()
    assert seen == ["before an update"]
    fence.close()
