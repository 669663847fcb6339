"""Guarded training where memory has no room, or there is none: what is secured goes straight to storage."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.faults.cluster import HELD, Cell, run
from tests.faults.matrix import judge, unbroken_run

NO_STORE: dict[str, Any] = {"memory": "/proc/nowhere"}
NO_ROOM: dict[str, Any] = {"memory_limit": 1}


@pytest.mark.parametrize(
    ("fault", "options"),
    [
        pytest.param("exception", NO_STORE, id="exception-no-store"),
        pytest.param(HELD, NO_ROOM, id="term-all-no-room"),
        pytest.param("exception", NO_ROOM, id="exception-no-room", marks=pytest.mark.campaign(seconds=6)),
        pytest.param(HELD, NO_STORE, id="term-all-no-store", marks=pytest.mark.campaign(seconds=6)),
    ],
)
def test_straight_to_storage(fault: str, options: dict[str, Any], root: Path, memory: Path, tmp_path: Path) -> None:
    cell = Cell(root, memory, "bare", fault, "backward", options=options)
    out = run(cell)
    assert any(code != 0 for code in out.codes[0]) and len(out.codes) == 2
    assert judge(out, unbroken_run(tmp_path, memory, "bare", 2)) == []
    assert "restored step 8 from storage" in cell.log(0).read_text()


def test_a_memory_store_that_vanishes_just_before_the_fault(root: Path, memory: Path, tmp_path: Path) -> None:
    cell = Cell(root, memory, "bare", "exception", "backward", memory_goes=True)
    out = run(cell)
    assert "step 8 goes straight to storage" in cell.log(0).read_text()
    assert judge(out, unbroken_run(tmp_path, memory, "bare", 2)) == []
    assert "restored step 8 from storage" in cell.log(0).read_text()
