"""Fixtures for stores in trouble."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

import pytest

from tests.faults.conftest import job, unbroken

__all__ = ["alarms", "job", "unbroken"]


@pytest.fixture
def alarms(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """Warnings of this test's saves so far. Jobs that earlier tests have left without closing them may still warn."""
    caplog.set_level(logging.WARNING, "rekindle")
    old = [thread for thread in threading.enumerate() if thread.name == "rekindle-keep"]

    def found() -> list[str]:
        theirs = {thread.ident for thread in old if thread.is_alive()}
        return [r.getMessage() for r in caplog.records if r.name == "rekindle" and r.thread not in theirs]

    return found
