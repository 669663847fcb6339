"""Calls of a save, its drain and its tidying that fail: a part of those that ``python -m tests.trouble`` plays."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.trouble.sweep import KINDS, PLACES, Worker, build


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    library = build(tmp_path_factory.mktemp("faults"))
    if library is None:
        pytest.skip("letting calls fail takes Linux and a C compiler")
    place = Path(
        tempfile.mkdtemp(prefix="rekindle-trouble-", dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None)
    )
    worker = Worker(place, library)
    yield worker
    worker.close()
    shutil.rmtree(place, ignore_errors=True)


@pytest.mark.parametrize("every", [40, pytest.param(10, marks=pytest.mark.campaign(seconds=5))])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("place", PLACES)
def test_a_call_that_fails_costs_nothing(place: str, kind: str, every: int, worker: Worker) -> None:
    for cell in worker.cells(place, kind, every, offset=KINDS.index(kind)):
        outcome = worker.play(cell)
        assert not outcome.wrong, f"{cell}: {outcome.wrong}; it said {outcome.alarms}"
        assert outcome.fired, f"{cell}: was never reached"
