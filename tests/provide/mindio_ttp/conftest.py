from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import rekindle.provide
from rekindle.provide.mindio_ttp import callbacks, mindx, processor

PROVIDED = Path(rekindle.provide.__file__).parent / "path"


@pytest.fixture(autouse=True)
def begins_anew(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, memory: Path) -> Iterator[None]:
    """Calls of one test leave nothing to another: what a process has one of is the test's own."""
    monkeypatch.setenv("REKINDLE_TTP_ROOT", str(tmp_path / "root"))
    monkeypatch.setenv("REKINDLE_MEMORY", str(memory))
    for name in ("TTP_NORMAL_ACTION_TIME_LIMIT", "TTP_STOP_CLEAN_BEFORE_DUMP"):
        monkeypatch.delenv(name, raising=False)
    yield
    processor.end()
    callbacks.callbacks.__init__()  # type: ignore[misc]
    callbacks._said.clear()
    mindx._registered.clear()


@pytest.fixture
def provided(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The test can import mindio_ttp."""
    monkeypatch.syspath_prepend(str(PROVIDED / "mindio_ttp"))
    yield
    for name in [name for name in sys.modules if name.split(".")[0] == "mindio_ttp"]:
        del sys.modules[name]
