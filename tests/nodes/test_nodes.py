"""The promises to a job on several nodes, each once. ``test_matrix`` has the other faults and kinds of jobs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.nodes.cases import CASES, Unbroken, judge, play
from tests.nodes.outcome import Outcome


def outcome_of(name: str, kind: str, unbroken: Unbroken, directory: Path) -> Outcome:
    case = CASES[name]
    out = play(case, kind, directory)
    assert judge(case, kind, out, unbroken.digests(kind, case.world, case.steps, case.width)) == [], out
    return out


@pytest.mark.campaign(seconds=15)
def test_both_nodes_name_the_rank_that_was_killed(unbroken: Unbroken, tmp_path: Path) -> None:
    out = outcome_of("one rank killed", "ddp", unbroken, tmp_path)
    assert out.noticed.keys() == {"nodea", "nodeb"}


def test_a_lost_node_costs_no_step_that_others_have_copied(unbroken: Unbroken, tmp_path: Path) -> None:
    """Each node has one half of the state: the lost one's comes from the copy on the other."""
    out = outcome_of("node lost, power", "fsdp2", unbroken, tmp_path)
    assert set(out.places) == {"memory", "peer"}
    assert "nodea" in out.silent


def test_a_blip_restarts_nothing(unbroken: Unbroken, tmp_path: Path) -> None:
    outcome_of("blip of 1.2 s", "ddp", unbroken, tmp_path)
