"""What the matrix takes for a promise that was not kept: outcomes made up for that. Needs no lab."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rekindle.memory.fault import Fault
from tests.nodes.cases import CASES, SLACK, judge
from tests.nodes.outcome import Outcome, that_stands

_LOST = "lost: node {0} (rank 1) is lost: no sign of it for 10.0 s"


def good(name: str) -> Outcome:
    """The second of two nodes, or of three with a spare, has lost its power."""
    return Outcome(
        noticed={"nodea": (10.0, _LOST.format("nodeb"))},
        silent={"nodea": {"nodeb": 1.0}},
        trained=("nodea", "nodeb"),
        gone={"nodeb": 0.0},
        unheard={"nodeb": (0.0, ("nodea",))},
        restarts=1,
        lost=1,
        again=11.5,
        interval=5,
        sources={"memory", "peer"},
        digests=digests(name),
    )


def digests(name: str) -> dict[tuple[int, int], str]:
    return {(rank, step): "same" for rank in range(2) for step in range(1, CASES[name].steps + 1)}


def wrong(name: str, out: Outcome, kind: str = "fsdp2", slack: float = 0.0) -> list[str]:
    return judge(CASES[name], kind, out, digests(name), slack)


def test_what_keeps_all_promises_is_right() -> None:
    assert wrong("node lost, power", good("node lost, power")) == []


@pytest.mark.parametrize(
    ("seen", "said"),
    [
        ({"noticed": {}}, "nodea has not noticed it"),
        ({"noticed": {"nodea": (10.0, _LOST.format("nodea"))}}, "nodea says: " + _LOST.format("nodea")),
        ({"noticed": {"nodea": (0.1, "exception: rank 0 raised DistBackendError")}}, "nodea says: exception"),
        ({"silent": {}}, "nodea did not call nodeb silent in time"),
        ({"silent": {"nodea": {"nodec": 1.0}}}, "nodea did not call nodeb silent in time"),
        ({"silent": {"nodea": {"nodeb": 2.5}}}, "nodea did not call nodeb silent in time"),
        ({"lost": 9}, "9 steps lost"),
        ({"interval": 11}, "11 steps between two that were safe"),
        ({"again": 27.6}, "the first new step took 27.6 s"),
        ({"restarts": 2}, "2 restarts instead of 1"),
        ({"forgotten": [(10, 9)]}, "step 10 was safe, and the job went on from 9"),
        ({"sources": {"storage"}}, "bytes came from storage"),
        ({"differing": [(0, 3)]}, "differs from the unbroken run"),
    ],
)
def test_a_promise_that_is_not_kept_is_told(seen: dict[str, object], said: str) -> None:
    found = wrong("node lost, power", replace(good("node lost, power"), **seen))  # type: ignore[arg-type]
    assert len(found) == 1 and found[0].startswith(said), found


def test_a_node_that_has_all_of_the_state_loses_one_step_at_most() -> None:
    assert wrong("node lost, power", replace(good("node lost, power"), lost=2), "ddp") == ["2 steps lost"]
    assert wrong("node lost, power", replace(good("node lost, power"), lost=2), "fsdp2") == []


def test_each_node_that_is_left_must_have_noted_the_rank_that_was_killed() -> None:
    said = "signal: rank 1 was killed by SIGKILL"
    out = replace(good("one rank killed"), silent={}, gone={}, unheard={}, again=1.0, lost=0)
    both = {"nodea": (0.1, said), "nodeb": (0.1, said)}
    assert wrong("one rank killed", replace(out, noticed=both)) == []
    assert wrong("one rank killed", replace(out, noticed={"nodea": (0.1, said)})) == ["nodeb has not noticed it"]
    other = {**both, "nodeb": (0.1, "signal: rank 12 was killed by SIGKILL")}
    assert wrong("one rank killed", replace(out, noticed=other)) == ["nodeb says: " + other["nodeb"][1]]


def test_the_node_that_trained_is_to_be_named_whichever_it_is() -> None:
    name = "node lost, spare there"
    out = replace(good(name), again=5.0, trained=("nodea", "nodec"), gone={"nodec": 0.0})
    out = replace(out, silent={"nodea": {"nodec": 1.0}}, unheard={"nodec": (0.0, ("nodea",))})
    assert wrong(name, replace(out, noticed={"nodea": (3.0, _LOST.format("nodec"))})) == []
    assert len(wrong(name, replace(out, noticed={"nodea": (3.0, _LOST.format("nodeb"))}))) == 1


def test_a_fault_that_nobody_may_note_is_told() -> None:
    out = Outcome(noticed={"nodea": (1.0, "hang: rank 0 hangs")}, digests=digests("blip of 1.2 s"))
    assert wrong("blip of 1.2 s", out) == ["nodea says: hang: rank 0 hangs"]


def test_tests_give_each_bound_of_time_more_seconds() -> None:
    out = replace(good("node lost, power"), again=27.6, silent={"nodea": {"nodeb": 5.0}})
    assert len(wrong("node lost, power", out)) == 2 and wrong("node lost, power", out, slack=SLACK) == []


def test_an_earlier_cause_of_the_same_start_stands_and_a_fault_of_the_next_start_does_not() -> None:
    raised, lost = Fault("exception", 0, 1, 12, "rank 0 raised"), Fault("lost", 1, 1, 12, "node nodeb is lost")
    later = Fault("lost", 2, 2, 20, "node nodec is lost")
    assert that_stands([raised, lost, later]) == lost
    assert that_stands([raised, later]) == raised
