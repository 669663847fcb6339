"""Times, narrow terminals, progress bars, waits and completion: commands as a person at a terminal meets them."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

import pytest
from click.testing import CliRunner

from rekindle.cli import main
from tests.stored import job_in, remember, save


@pytest.fixture
def two_hours_east(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Local time that is not UTC."""
    with monkeypatch.context() as patch:
        patch.setenv("TZ", "UTC-2")
        time.tzset()
        yield
    time.tzset()


def test_ls_tells_when_each_copy_was_saved(root: Path, memory: Path, two_hours_east: None) -> None:
    """Local time for people, ISO with its zone for programs."""
    before = int(time.time())
    save(root, 4)
    receipt = remember(job_in(memory, root), 5)
    os.utime(receipt, (1_700_000_000, 1_700_000_000))
    told = CliRunner().invoke(main, ["ls", str(root), "--json"])
    at = {entry["place"]: datetime.fromisoformat(entry["saved_at"]).timestamp() for entry in json.loads(told.stdout)}
    assert at["memory"] == 1_700_000_000 and before <= at["storage"] <= time.time()
    table = CliRunner().invoke(main, ["ls", str(root)]).stdout
    assert "2023-11-15 00:13:20" in table
    assert time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at["storage"])) in table
