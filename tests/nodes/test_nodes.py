"""The promises to a job on several nodes, each once. ``test_matrix`` has the other faults and kinds of jobs."""

from __future__ import annotations

from pathlib import Path

from tests.nodes.cases import CASES, Unbroken, judge, play
from tests.nodes.outcome import Outcome


def outcome_of(name: str, unbroken: Unbroken, directory: Path) -> Outcome:
    case = CASES[name]
    out = play(case, "ddp", directory)
    assert judge(case, "ddp", out, unbroken.digests("ddp", case.world, case.steps)) == [], out
    return out


def test_both_nodes_name_the_rank_that_was_killed(unbroken: Unbroken, tmp_path: Path) -> None:
    out = outcome_of("one rank killed", unbroken, tmp_path)
    assert out.noticed.keys() == {"nodea", "nodeb"}


def test_a_lost_node_costs_one_step_at_most(unbroken: Unbroken, tmp_path: Path) -> None:
    """Nothing has reached storage: the state comes from the other node's memory."""
    out = outcome_of("node lost, power", unbroken, tmp_path)
    assert set(out.places) <= {"memory", "peer"} and "peer" in out.places
    assert "nodea" in out.silent


def test_a_blip_restarts_nothing(unbroken: Unbroken, tmp_path: Path) -> None:
    outcome_of("blip of 1.2 s", unbroken, tmp_path)
