"""Faults counted by what the job had to go back to."""

from __future__ import annotations

import pytest

from rekindle.memory.history import ASSUMED, history_of
from tests.memory.test_incident import some

SECURED = {"noticed": 1.0, "secured": 2.0, "first_step": 11.0}


def test_a_fault_counts_for_what_had_to_be_gone_back_to() -> None:
    history = history_of(
        [
            some(start="1" * 16),  # two steps back, to a snapshot
            some(start="2" * 16, place="storage"),
            some(start="3" * 16, step=6, moments=SECURED),  # one step back, the one under way
            some(start="4" * 16, step=9, moments=SECURED),  # a rank of several could not secure its part
            some(start="5" * 16, cause="running", seconds=1000.0, moments={}),
        ]
    )
    assert (history.faults, history.to_snapshots, history.to_storage) == (4, 2, 1)
    assert history.seconds == 4 * 50 + 1000 and history.outage == pytest.approx((28 + 28 + 10 + 10) / 4)
    assert history.between(1) == (1200 + ASSUMED) / 2


def test_hosts_of_one_start_count_once() -> None:
    history = history_of([some(), some(host="other", seconds=None, place="storage", moments={})])
    assert (history.faults, history.to_snapshots, history.to_storage, history.seconds) == (1, 0, 1, 50)


def test_nothing_is_known_of_a_job_without_records() -> None:
    history = history_of([])
    assert (history.seconds, history.faults, history.outage) == (0, 0, 0) and history.between(0) == ASSUMED
