from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.nodes.cases import Unbroken
from tests.nodes.lab import Lab, why_not


@pytest.fixture(scope="session")
def _namespaces() -> None:
    if reason := why_not():
        pytest.skip(reason)


@pytest.fixture
def lab(_namespaces: None, tmp_path: Path) -> Iterator[Lab]:
    with Lab(tmp_path) as lab:
        yield lab


@pytest.fixture(scope="session")
def unbroken(_namespaces: None, tmp_path_factory: pytest.TempPathFactory) -> Unbroken:
    return Unbroken(tmp_path_factory.mktemp("unbroken"))
