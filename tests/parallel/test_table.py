"""Saved by one kind of parallelism on some ranks, restored by the same or another one on others, for real.

``python -m tests.parallel.table --full`` does all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.parallel.cells import PLACES, Cell, every_cell, judge, short_cells
from tests.parallel.jobs import Saved, resume
from tests.parallel.kinds import KINDS

SHORT = list(short_cells())


@pytest.mark.parametrize("cell", SHORT, ids=str)
def test_every_bit_comes_back(cell: Cell, saved_by: Callable[[str, int], Saved], tmp_path: Path, memory: Path) -> None:
    saved = saved_by(cell.kind, cell.ranks)
    assert judge(cell, saved, resume(saved, cell.new_kind, cell.new_ranks, cell.place, tmp_path, memory)) == []


def test_the_short_table_leaves_no_kind_and_no_number_of_ranks_out() -> None:
    assert {c.kind for c in SHORT} == {c.new_kind for c in SHORT} == KINDS.keys()
    assert {(c.kind, c.place) for c in SHORT} == {(kind, place) for kind in KINDS for place in PLACES}
    assert {c.kind for c in SHORT if c.same} >= {"fsdp1", "fsdp2", "tp", "hsdp"}  # losses bit for bit
    assert {c.ranks for c in SHORT} == {c.new_ranks for c in SHORT} == {1, 2, 3, 4}
    assert {c for c in SHORT if c.kind == c.new_kind} <= set(every_cell())
    assert len(set(every_cell())) == len(every_cell())
