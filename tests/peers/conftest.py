"""The memory of two nodes: of one that is there, and of one that asks it."""

from __future__ import annotations

from pathlib import Path

import pytest

from rekindle.memory.job_dir import JobDir, memory_base
from tests.peers.peer import far_job


@pytest.fixture
def far(memory: Path) -> JobDir:
    return far_job(memory)


@pytest.fixture
def near(memory: Path) -> JobDir:
    """Of a node that came in place of a lost one, say."""
    job = JobDir.of("/somewhere/run", memory_base(memory / "near"))
    job.create()
    return job
