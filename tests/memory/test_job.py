"""The record of a job: older ones lack fields, and what makes no sense is refused."""

from __future__ import annotations

from typing import Any

import pytest

from rekindle.memory.job import JobInfo

WHOLE = JobInfo(
    *("/root", [0, 1], 4, 2, None, 900.0, 10**6, 30.0, "a" * 16, "10.0.0.1"),
    peer_every=20,
    peer_limit=10**9,
    patience=4,
    headroom=1 << 30,
    persist_budget=0.01,
)


def test_a_record_is_read_as_it_was_written() -> None:
    for copied in (20, None, "auto"):
        said = {**WHOLE.to_json(), "peer_every": copied}
        assert JobInfo.from_json(said) == JobInfo(**{**vars(WHOLE), "peer_every": copied})


def test_a_record_of_an_older_version_has_the_defaults() -> None:
    new = {"peer_every", "peer_limit", "patience", "headroom", "persist_budget"}
    read = JobInfo.from_json({name: value for name, value in WHOLE.to_json().items() if name not in new})
    assert read.persist_budget is None
    assert (read.peer_every, read.peer_limit, read.patience, read.headroom) == ("auto", None, 10.0, 0)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("peer_every", 0), ("peer_every", "often"), ("peer_every", True), ("peer_every", [1])),
        *(("peer_limit", 0), ("peer_limit", "1MB"), ("headroom", -1), ("headroom", None)),
        *(("persist_budget", 0.0), ("persist_budget", 1.0), ("persist_budget", "1%"), ("persist_budget", True)),
        *(("patience", -1.0), ("patience", float("nan")), ("patience", "long"), ("patience", None)),
    ],
)
def test_what_makes_no_sense_is_refused(name: str, value: Any) -> None:
    with pytest.raises((ValueError, TypeError)):
        JobInfo.from_json({**WHOLE.to_json(), name: value})
