from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import rekindle.provide
from rekindle.provide.mindio_acp import checking, saving
from rekindle.provide.mindio_acp.background import background
from rekindle.provide.mindio_acp.earlier import Earlier
from rekindle.provide.mindio_acp.helper import CheckpointHelper
from tests.files.conftest import drainer, no_agent, store  # noqa: F401  fixtures

PROVIDED = Path(rekindle.provide.__file__).parent / "path"


@pytest.fixture(autouse=True)
def begins_anew(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What a process has one of is the test's own."""
    monkeypatch.setattr(saving, "_earlier", Earlier())
    monkeypatch.setattr(CheckpointHelper, "_made", None)
    monkeypatch.delenv("REKINDLE_FILES_LIMIT", raising=False)
    yield
    checking._running.clear()
    background._begin()


@pytest.fixture
def provided(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs that the test starts can import mindio_acp, and so can the test."""
    folder = str(PROVIDED / "mindio_acp")
    monkeypatch.setenv("PYTHONPATH", folder)
    monkeypatch.syspath_prepend(folder)
    sys.modules.pop("mindio_acp", None)
