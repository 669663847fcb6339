"""What the tests of sharded state share: jobs that have saved, made once."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.parallel.jobs import Saved, save


@pytest.fixture(scope="session")
def saved_by(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str, int], Saved]]:
    """What a job of some kind has saved on so many ranks: made once, left as it is by those who read it."""
    memory = Path(tempfile.mkdtemp(prefix="rekindle-test-", dir="/dev/shm" if os.path.isdir("/dev/shm") else None))
    known: dict[tuple[str, int], Saved] = {}

    def get(kind: str, world: int) -> Saved:
        if (kind, world) not in known:
            known[kind, world] = save(kind, world, tmp_path_factory.mktemp("saved"), memory)
        return known[kind, world]

    yield get
    shutil.rmtree(memory, ignore_errors=True)
