"""All faults of several nodes, each with all kinds of jobs for which it makes a difference."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.nodes.cases import CASES, Unbroken, judge, play
from tests.nodes.job import Job
from tests.nodes.lab import Lab
from tests.nodes.train import KINDS, Task

CELLS = [(name, kind) for name, case in CASES.items() for kind in case.kinds]


@pytest.mark.campaign(seconds=25)
@pytest.mark.parametrize(("name", "kind"), CELLS, ids=[f"{name}-{kind}" for name, kind in CELLS])
def test_a_fault(name: str, kind: str, unbroken: Unbroken, tmp_path: Path) -> None:
    case = CASES[name]
    out = play(case, kind, tmp_path)
    assert judge(case, kind, out, unbroken.digests(kind, case.world, case.steps, case.width)) == [], out


@pytest.mark.campaign(seconds=15)
@pytest.mark.parametrize("kind", KINDS)
def test_a_node_without_the_storage_is_named_and_does_not_train(kind: str, lab: Lab) -> None:
    lab.add()
    lab.add(mounted=False)
    with Job(lab, Task(str(lab.mount / "run"), str(lab.directory), kind), starts=1) as job:
        said = job.wait_for_failure()
    why = r"UsageError: .*: node nodeb \(rank 1\) does not see what node nodea .*: mount the same file system"
    assert re.search(why, said), said
    assert not job.rows("step")
