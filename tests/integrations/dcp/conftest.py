"""Writers belong to the process, not to the test: each test gets a process that has none."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

import pytest

from rekindle.errors import NotDurableError
from rekindle.integrations.dcp import session as runs


@pytest.fixture(autouse=True)
def no_writers(request: pytest.FixtureRequest) -> Iterator[None]:
    if "memory" in request.fixturenames:
        request.getfixturevalue("memory")  # it is taken away after the writers, not under them
    yield
    for run in list(runs._sessions.values()):
        with suppress(NotDurableError):
            run.close(1.0)
    runs._loaded.clear()
