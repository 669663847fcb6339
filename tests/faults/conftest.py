"""Fixtures for the fault tests."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from rekindle.memory.job_dir import JobDir, memory_base
from tests.faults.harness import Run, digest_of, kill, train, wait_for
from tests.faults.matrix import unbroken_run


@pytest.fixture
def job(root: Path, memory: Path) -> Iterator[JobDir]:
    """The job's directory; whoever is still in it at the end is killed."""
    job = JobDir.of(root, memory_base(memory))
    yield job

    def gone() -> bool:
        """An agent may have been on its way when its trainer died."""
        there = [pid for pid in (*job.trainers().values(), job.agent()) if pid not in (None, os.getpid())]
        for pid in filter(None, there):  # 0 is one that has its lock, and is about to write its number into it
            with suppress(ProcessLookupError):
                kill(pid)
        return not there

    wait_for(gone, what="everybody is gone")


@pytest.fixture(scope="module")
def unbroken_cell(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Path, str, int], list[str]]:
    """Digests that the ranks of a configuration of the matrix end with when nothing happens to them."""
    found: dict[tuple[str, int], list[str]] = {}

    def find(memory: Path, config: str, world: int) -> list[str]:
        if (config, world) not in found:
            found[config, world] = unbroken_run(tmp_path_factory.mktemp(config), memory, config, world)
        return found[config, world]

    return find


_unbroken: dict[tuple[int, int, int], list[str]] = {}


@pytest.fixture
def unbroken(tmp_path: Path) -> Callable[[Run], list[str]]:
    """What each rank of an unbroken run of the same shape ends with."""

    def digest(run: Run) -> list[str]:
        key = run.steps, run.world, run.width
        if key not in _unbroken:
            twin = Run(tmp_path / "unbroken", run.memory / "unbroken", run.steps, run.world, width=run.width)
            assert train(twin) == [0] * run.world, twin.log(0).read_text()
            _unbroken[key] = [digest_of(twin, rank) for rank in range(run.world)]
        return _unbroken[key]

    return digest
