"""Fixtures for the memory store."""

from __future__ import annotations

from pathlib import Path

import pytest

from rekindle.memory.job_dir import JobDir, memory_base


@pytest.fixture
def job(memory: Path, root: Path) -> JobDir:
    job = JobDir.of(root, memory_base())
    job.create()
    return job
