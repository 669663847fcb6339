"""Faults as other nodes tell of them: which one came first, and that what they say is checked."""

from __future__ import annotations

import json
import math
import time
from itertools import permutations
from typing import Any

import pytest

from rekindle.agent.beat import Beat, Page, fault_from_json, fault_to_json
from rekindle.agent.first_cause import first_of, follows
from rekindle.errors import FormatError
from rekindle.memory.fault import Fault
from rekindle.memory.status import STABLE, TRAINING, Status

NOW = 1000.0
COLLECTIVE = "rank 0 raised RuntimeError: [gloo/transport/tcp/pair.cc:547] Connection closed by peer"


def fault(cause: str, rank: int, after: float, what: str = "") -> Fault:
    return Fault(cause, rank, 1, 7, what or f"rank {rank}: {cause}", noticed=NOW + after)


@pytest.mark.parametrize(
    "faults",
    [
        [
            fault("signal", 3, 0.5),
            fault("exit", 2, 0.0),
            fault("exception", 1, -0.1),
            fault("exception", 0, -0.2, COLLECTIVE),
        ],
        [fault("lost", 2, 1.2), fault("exception", 0, 0.0, COLLECTIVE)],
        [fault("exception", 1, 0.0), fault("exception", 0, 0.1)],
        [fault("notice", 0, 0.001), fault("notice", 1, 0.0)],
        [fault("hang", 1, 0.0), fault("exit", 0, 0.0)],
    ],
)
def test_the_first_cause_is_the_same_in_whatever_order_nodes_hear_of_them(faults: list[Fault]) -> None:
    assert {first_of(list(order)) for order in permutations(faults)} == {faults[0]}


def test_only_what_comes_soon_can_be_the_cause_of_a_fault_that_was_announced() -> None:
    known = fault("exception", 0, 0.0, COLLECTIVE)
    assert follows(known, fault("lost", 2, 1.2)) and not follows(known, fault("lost", 2, 11.0))
    assert not follows(fault("signal", 3, 0.0), fault("exception", 1, -0.5))


def test_a_fault_keeps_its_age_on_its_way_to_another_clock() -> None:
    now = time.monotonic()
    hang = Fault("hang", 1, 2, 7, "rank 1 hangs", noticed=now - 2, began=now - 5)
    sent = json.loads(json.dumps(fault_to_json(hang)))
    sent["fault"]["noticed"] += 1e6
    sent["fault"]["began"] += 1e6  # as of another host
    got = fault_from_json(sent)
    assert got.noticed == pytest.approx(now - 2, abs=1) and got.began == pytest.approx(got.noticed - 3)
    assert (got.what, got.at) == (hang.what, hang.at)


def a_beat() -> dict[str, Any]:
    status = Status(5, 1, STABLE, TRAINING, 0, 17, 16, -1, 0.3, time.monotonic_ns() - 10**9, "of 20", 0.5)
    beat = Beat(
        [1, 2],
        {4: Page(status, 60.0, True)},
        paused_at=time.monotonic() - 3,
        unsettled_at=time.monotonic() - 9,
        newest=16,
        durable=10,
    )
    found: dict[str, Any] = json.loads(json.dumps(beat.to_json()))
    return found


def test_a_beat_arrives_as_it_was() -> None:
    beat = Beat.from_json(a_beat())
    status, floor, stopped = beat.pages[4]
    assert (status.step, status.snapshot, status.note, floor, stopped) == (17, 16, "of 20", 60.0, True)
    assert status.age == pytest.approx(1.0, abs=0.5) and list(beat.hears) == [1, 2]
    assert beat.paused_at == pytest.approx(time.monotonic() - 3, abs=0.5) and (beat.newest, beat.durable) == (16, 10)
    assert beat.unsettled_at == pytest.approx(time.monotonic() - 9, abs=0.5)


def test_a_beat_of_an_agent_that_knows_of_no_doubts_is_taken() -> None:
    beat = a_beat()
    del beat["unsettled"]
    assert Beat.from_json(beat).unsettled_at is None


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("hears", [-1]),
        ("hears", "all"),
        ("pages", {}),
        ("paused", math.inf),
        ("paused", "now"),
        ("unsettled", "now"),
        ("cleared", 1),
        ("newest", 0.5),
    ],
)
def test_a_beat_that_makes_no_sense_is_refused(field: str, value: Any) -> None:
    with pytest.raises((ValueError, FormatError)):
        Beat.from_json({**a_beat(), field: value})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("rank", -1),
        ("rank", 1 << 40),
        ("phase", 99),
        ("stage", "x"),
        ("age", math.nan),
        ("floor", math.inf),
        ("note", 5),
        ("step", None),
    ],
)
def test_nor_is_a_page_of_it(field: str, value: Any) -> None:
    beat = a_beat()
    beat["pages"][0][field] = value
    with pytest.raises((ValueError, TypeError, FormatError)):
        Beat.from_json(beat)
