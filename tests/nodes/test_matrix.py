"""All faults of several nodes, each with all kinds of jobs for which it makes a difference."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.nodes.cases import CASES, Unbroken, judge, play

CELLS = [(name, kind) for name, case in CASES.items() for kind in case.kinds]


@pytest.mark.campaign(seconds=25)
@pytest.mark.parametrize(("name", "kind"), CELLS, ids=[f"{name}-{kind}" for name, kind in CELLS])
def test_a_fault(name: str, kind: str, unbroken: Unbroken, tmp_path: Path) -> None:
    case = CASES[name]
    out = play(case, kind, tmp_path)
    assert judge(case, kind, out, unbroken.digests(kind, case.world, case.steps)) == [], out
