from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from rekindle.agent.file_drain import FileDrainer
from rekindle.files import client as clients
from rekindle.files import settings
from rekindle.memory.files_dir import FilesDir
from rekindle.memory.job_dir import memory_base
from rekindle.memory.lock import Lock
from rekindle.session.agent_keeper import AgentKeeper
from tests.objects.conftest import bucket, s3, server  # noqa: F401  fixtures


@pytest.fixture
def store(memory: Path) -> Iterator[FilesDir]:
    """The files of a memory store of the test's own, which this process uses from its next save on."""
    yield FilesDir.below(memory_base())
    if clients._client is not None:
        clients._client.close()
        clients._client = None
    settings._given.clear()
    settings._roots.clear()


@pytest.fixture
def drainer(store: FilesDir, monkeypatch: pytest.MonkeyPatch) -> Iterator[FileDrainer]:
    """Carries files when the test says so. No agent comes up beside it, and nobody waits for one."""
    monkeypatch.setattr(clients, "_AGENT_WITHIN", 0.0)
    store.create()
    lock = Lock(store.paths.agent_lock)
    assert lock.acquire()
    yield FileDrainer(store)
    for file in store.kept.files():  # nothing to wait for at the end
        store.kept.remove(file)
    lock.release()


@pytest.fixture
def no_agent(store: FilesDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets no agent start, of which a process makes sure in a second, not in ten."""
    monkeypatch.setattr("rekindle.session.agent_keeper.sys.executable", "/nowhere/python")
    monkeypatch.setattr(clients, "AgentKeeper", partial(AgentKeeper, within=1.0))
