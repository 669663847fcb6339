"""A framework's version that no test has seen is named; patches of a tested one are not."""

from __future__ import annotations

import logging
from importlib.metadata import version

import pytest

from rekindle.integrations.versions import warn_if_untested


@pytest.mark.parametrize(
    ("first", "last", "named"),
    [("1.9", "1.10", True), ("9999.1", "9999.2", True), ("1.0", "9999.1", False), ("series", "series", False)],
)
def test_versions(first: str, last: str, named: bool, caplog: pytest.LogCaptureFixture) -> None:
    here = ".".join(version("pytest").split(".")[:2])
    first, last = (here if name == "series" else name for name in (first, last))
    with caplog.at_level(logging.WARNING, "rekindle"):
        warn_if_untested("pytest", first, last)
    assert [f"pytest {version('pytest')}" in line for line in caplog.messages] == [True] * named
