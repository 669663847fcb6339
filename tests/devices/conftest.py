from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.devices.fake import FakeBackend, install


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeBackend]:
    """A device of this process. What it has complained of fails the test."""
    backend = FakeBackend()
    install(monkeypatch, backend)
    yield backend
    backend.close()
    assert not backend.complaints
