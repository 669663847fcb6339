"""Times as people write them."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rekindle.common.durations import describe_seconds, parse_seconds, round_seconds


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("30s", 30), ("10min", 600), ("1.5 h", 5400), (" 2d ", 172800), ("500ms", 0.5), (".5s", 0.5), ("0s", 0)],
)
def test_times_are_read(text: str, seconds: float) -> None:
    assert parse_seconds(text) == seconds


@pytest.mark.parametrize(
    "text", ["", "30", "s", "-1s", "1e3s", "10 minutes", "1h30min", "1,5s", "nan", "inf s", "auto"]
)
def test_other_texts_are_no_times(text: str) -> None:
    assert math.isnan(parse_seconds(text))


@given(st.floats(1e-4, 1e9))
def test_what_is_written_is_read_again_and_is_close(seconds: float) -> None:
    text = describe_seconds(seconds)
    assert parse_seconds(text) == pytest.approx(seconds, rel=0.05) and round_seconds(seconds) == parse_seconds(text)


def test_times_are_written_in_the_unit_of_their_size() -> None:
    told = {
        0: "0ms",
        0.0123: "12ms",
        1.0: "1s",
        0.96: "960ms",
        30: "30s",
        47.31: "47s",
        240: "4min",
        7200: "2h",
        5e5: "5.8d",
    }
    assert {seconds: describe_seconds(seconds) for seconds in told} == told
