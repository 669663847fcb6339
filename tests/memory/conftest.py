"""Fixtures for the memory store."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest

from rekindle.memory.job_dir import JobDir, memory_base
from tests.memory.page_locks import Lock


@pytest.fixture
def job(memory: Path, root: Path) -> JobDir:
    job = JobDir.of(root, memory_base())
    job.create()
    return job


@pytest.fixture
def page_locks() -> Iterator[type[Lock]]:
    gc.collect()
    Lock.alive.clear()
    Lock.late.clear()
    Lock.dropped_by.clear()
    yield Lock
    gc.collect()
    assert not Lock.alive and not Lock.late
