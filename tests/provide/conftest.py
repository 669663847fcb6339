from __future__ import annotations

from collections.abc import Iterator

import pytest

from rekindle.provide.torch_nebula import checkpoint, keeping, settings
from rekindle.provide.torch_nebula.catalog import Versions
from tests.files.conftest import drainer, store  # noqa: F401  fixtures


@pytest.fixture(autouse=True)
def _as_in_a_new_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Lets no test see what another one has set."""
    for name in ("NEBULA_PERSISTENT_STORAGE_PATH", "NEBULA_PERSISTENT_TIME_INTERVAL", "NEBULA_MEMORY_BUFFER_SIZE"):
        monkeypatch.delenv(name, raising=False)
    yield
    for work in list(keeping._keeping.values()):
        work.exception(60)
    settings._current, Versions.newest = None, 0
    for known in (checkpoint._begun, checkpoint._persisted, keeping._used, keeping._keeping):
        known.clear()
