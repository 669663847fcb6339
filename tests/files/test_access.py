"""Credentials: the agent has those of the process that started it, or of one that needs others."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

import rekindle
from rekindle.files import client as clients
from rekindle.files.access import lacks_access
from rekindle.memory.files_dir import FilesDir
from tests.faults.harness import wait_for
from tests.files.programs import KILLED, run
from tests.objects.servers import Server

pytest.importorskip("obstore")

_SAVE = "rekindle.save(b'data', sys.argv[1])"
_DIE = "; os.kill(os.getpid(), signal.SIGKILL)"


@pytest.fixture
def agent_without(server: Server, store: FilesDir, root: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    """An agent that a program without credentials has started. This process has them."""
    with monkeypatch.context() as context:
        for name in server.environment:
            context.delenv(name, raising=False)
        assert run(f"{_SAVE}; rekindle.flush(timeout=60)", root / "x") == 0
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    agent = store.agent()
    assert agent
    return agent


def test_an_agent_without_this_programs_credentials_is_replaced(
    agent_without: int, store: FilesDir, bucket: str
) -> None:
    """Though the program is killed at once."""
    url = f"s3://{bucket}/access/{time.monotonic_ns()}"
    assert lacks_access(agent_without)
    assert run(_SAVE + _DIE, url) == KILLED
    wait_for(lambda: not store.kept.newest(stored=False), timeout=60)
    assert rekindle.load(url, raw=True) == b"data"
    agent = store.agent()
    assert agent not in (None, agent_without) and not lacks_access(agent)


def test_programs_that_save_to_paths_leave_the_agent_alone(agent_without: int, store: FilesDir, root: Path) -> None:
    assert run(f"{_SAVE}; rekindle.flush(timeout=60)", root / "y") == 0
    assert store.agent() == agent_without


def test_credentials_that_change_later_replace_no_agent(
    agent_without: int, store: FilesDir, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"s3://{bucket}/access/{time.monotonic_ns()}"
    rekindle.save(b"first", f"{url}/first")
    rekindle.flush(timeout=60)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "new")
    assert lacks_access(store.agent() or 0) and clients._client is not None
    replaced: list[int] = []
    monkeypatch.setattr(clients._client._keeper, "replace", replaced.append)
    rekindle.save(b"second", f"{url}/second")
    rekindle.flush(timeout=60)
    assert replaced == [], "two programs with different ones would replace each other's agents for ever"


def test_an_agent_that_is_replaced_in_an_upload_finishes_it(
    server: Server, bucket: str, store: FilesDir, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = "rekindle.files.configure(drain_limit='20MB/s'); rekindle.save(bytes(40_000_000), sys.argv[1])"
    assert run(code + _DIE, root / "large") == KILLED
    agent = wait_for(store.agent)
    inode = wait_for(lambda: [path.stat().st_ino for path in root.glob(".rekindle-*")])[0]
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    url = f"s3://{bucket}/access/{time.monotonic_ns()}"
    assert run(_SAVE + _DIE, url) == KILLED
    wait_for(lambda: not store.kept.newest(stored=False), timeout=60)
    assert (root / "large").stat().st_ino == inode and rekindle.load(url, raw=True) == b"data"
    assert store.agent() != agent


def test_only_an_agent_is_asked_for_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_PROFILE", "ours")
    assert not lacks_access(os.getpid()) and not lacks_access(1 << 30)
