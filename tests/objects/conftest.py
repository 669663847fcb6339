from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.objects.servers import Server, some_server


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The server of this run, which pytest-xdist's workers share: their own directories lie in that of the run."""
    own = tmp_path_factory.getbasetemp()
    run = own.parent if "PYTEST_XDIST_WORKER" in os.environ else own
    with some_server(run / "server") as running:
        yield running


@pytest.fixture(scope="session")
def bucket(server: Server) -> str:
    return server.bucket()


@pytest.fixture
def s3(server: Server, bucket: str, monkeypatch: pytest.MonkeyPatch) -> Server:
    """The server, as this process's environment names it."""
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    return server
