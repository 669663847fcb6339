"""Saved by one kind of parallelism on some ranks, restored by the same or another one on others, for real.

``python -m tests.parallel.table --full`` does all of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.parallel.cells import PLACES, Cell, every_cell, judge, short_cells
from tests.parallel.jobs import SAVED, Saved, resume
from tests.parallel.kinds import KINDS
from tests.parallel.truth import differences
from tests.parallel.written import Written, read

SHORT = list(short_cells())
SLOW = ("fsdp2+tp", "hsdp", "tp")
"""Kinds that take long: saved in campaigns alone, and restored there but for the first."""
SAVERS = [
    pytest.param(kind, ranks, marks=[pytest.mark.campaign(seconds=10)] * (kind in SLOW))
    for kind, ranks in sorted({(cell.kind, cell.ranks) for cell in SHORT})
]
Get = Callable[[str, int], Saved]


def marks_of(cell: Cell) -> list[pytest.MarkDecorator]:
    return [pytest.mark.campaign(seconds=10)] * (cell.kind in SLOW or cell.new_kind in SLOW[1:])


@pytest.mark.parametrize("cell", [pytest.param(cell, id=str(cell), marks=marks_of(cell)) for cell in SHORT])
def test_every_bit_comes_back(cell: Cell, saved_by: Get, tmp_path: Path, memory: Path) -> None:
    saved = saved_by(cell.kind, cell.ranks)
    assert judge(cell, saved, resume(saved, cell.new_kind, cell.new_ranks, cell.place, tmp_path, memory)) == []


def test_the_short_table_leaves_no_kind_and_no_number_of_ranks_out() -> None:
    assert {c.kind for c in SHORT} == {c.new_kind for c in SHORT} == KINDS.keys()
    assert {c.place for c in SHORT} == {c.place for c in SHORT if c.same} == set(PLACES)  # losses bit for bit
    assert {c.ranks for c in SHORT} == {c.new_ranks for c in SHORT} == {1, 2, 3, 4}
    assert {c for c in SHORT if c.kind == c.new_kind} <= set(every_cell())
    assert len(set(every_cell())) == len(every_cell())


# -- what such a save sends, and what it writes: nothing, and each byte once -------------------------------------------


def on_storage(saved: Saved) -> Written:
    return read(saved.stores.root / f"step-{SAVED:010}")


def in_memory(saved: Saved) -> Written:
    return read(saved.stores.job.path / f"step-{SAVED:010}")


@pytest.mark.parametrize(("kind", "ranks"), SAVERS)
def test_a_save_sends_nothing(kind: str, ranks: int, saved_by: Get) -> None:
    """No collective and no message, by the counts of the process groups; not even in the copy behind the training."""
    for answer in saved_by(kind, ranks).answers:
        for before, after in answer["messages"]:
            assert before == after


def test_what_counts_messages_counts_them(saved_by: Get) -> None:
    for answer in saved_by("ddp", 3).answers:
        sent = [before for before, _ in answer["messages"]]
        assert len(sent) == SAVED and sent[0] < sent[1] < sent[2]


@pytest.mark.parametrize(("kind", "ranks"), SAVERS)
def test_files_hold_the_truth_and_every_shared_element_once(kind: str, ranks: int, saved_by: Get) -> None:
    saved = saved_by(kind, ranks)
    truth = {k: v for k, v in torch.load(saved.truth).items() if isinstance(v, torch.Tensor)}
    most = 2 if kind == "fsdp2+tp" else 1  # what isn't cut up by layer knows of the ranks that share the data only
    for written in (in_memory(saved), on_storage(saved)):
        for name, counted in written.covered.items():
            if math.prod(counted.shape) > 1:  # a counter may be there several times, which is cheaper than to share it
                assert counted.ge(1).all() and counted.le(most).all(), name
        own = {name: next(iter(parts.values())) for name, parts in written.own.items()}
        found = written.tensors | own
        assert found.keys() <= truth.keys()
        assert differences({name: truth[name] for name in found}, found) == []
        tied = truth.keys() - found.keys()
        assert tied <= {"model.blocks.0.again.weight"} | {name for name in truth if name.endswith(".step")}


def test_with_ddp_a_node_writes_each_byte_once(saved_by: Get) -> None:
    saved = saved_by("ddp", 3)
    truth = {k: v for k, v in torch.load(saved.truth).items() if isinstance(v, torch.Tensor)}
    written = on_storage(saved)
    assert written.own.keys() == {"model.passes", "model.scale"}  # buffers are what a rank may have of its own
    shared = {name: tensor.nbytes for name, tensor in truth.items() if name not in written.own}
    del shared["model.blocks.0.again.weight"]  # tied to another one
    assert dict(written.nbytes) == shared
    by_rank = [sum(c["range"][1] - c["range"][0] for c in receipt["tensors"]) for receipt in written.receipts]
    assert sum(by_rank) == sum(shared.values()) + 3 * sum(truth[name].nbytes for name in written.own)
