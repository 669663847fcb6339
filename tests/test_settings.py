"""Options: one place for their defaults and checks, which name the option that makes no sense."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

import pytest

import rekindle
from rekindle.settings import Settings


def test_a_checkpointer_takes_every_option_and_has_its_default() -> None:
    parameters = inspect.signature(rekindle.Checkpointer.__init__).parameters.values()
    taken = {one.name: one.default for one in parameters if one.kind is inspect.Parameter.KEYWORD_ONLY}
    assert taken == {field.name: field.default for field in dataclasses.fields(Settings)}


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("snapshot_every", 0, "snapshot_every is 0: must be a whole number of at least 1"),
        ("snapshot_every", "often", "snapshot_every is 'often': must be a whole number"),
        ("persist_every", True, "persist_every is True: must be a whole number"),
        ("keep", 1 << 63, "less than 2 to the 63rd"),
        ("keep_every", 1.0, "keep_every is 1.0: must be a whole number"),
        ("memory_limit", 0, "memory_limit is 0: must be a whole number of at least 1"),
        ("memory_headroom", -1, "memory_headroom is -1: must be a whole number of at least 0"),
        ("overlap", "late", "overlap is 'late': must be 'auto', True, False or 'verify'"),
        ("snapshot_budget", 1.0, "snapshot_budget is 1.0: must be a share of training time"),
        ("persist_seconds", -1.0, "persist_seconds is -1.0: must be a number of seconds, 0 or more than 0"),
        ("idle_timeout", 0.0, "idle_timeout is 0.0: must be a number of seconds, more than 0"),
        ("fallback_after", float("inf"), "fallback_after is inf: must be a number of seconds"),
        ("drain_limit", "fast", "'fast' is not a rate"),
    ],
)
def test_an_option_that_makes_no_sense_is_refused_by_name(option: str, value: object, message: str) -> None:
    given: dict[str, Any] = {option: value}
    with pytest.raises(rekindle.UsageError) as raised:
        Settings(**given)
    assert message in str(raised.value)


def test_what_makes_sense_is_kept_as_it_was_given() -> None:
    settings = Settings(persist_seconds=0, memory_headroom=0, drain_limit="5MB/s", keep=3)
    assert (settings.drain_rate, settings.retention, settings.memory_headroom) == (5_000_000, (3, None), 0)
    with pytest.raises(dataclasses.FrozenInstanceError):
        settings.keep = 4  # type: ignore[misc]


def test_ranks_compare_what_each_decides_by_alone() -> None:
    agreed = Settings(keep=3, persist_every=10).agreed()
    assert agreed["persist_every"] == 10 and "keep" not in agreed
