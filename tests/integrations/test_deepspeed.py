"""Real DeepSpeed on two ranks: killed at any moment it goes on from memory, and ends as if nothing had happened."""

from __future__ import annotations

import socket
import zipfile
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from rekindle.common.environ import LAUNCH
from rekindle.faults.imports import IMPORTS
from rekindle.storage.path_place import is_placeholder
from tests.integrations.environments import environment, launch, lines

PROGRAM = "train_deepspeed"


def train(python: str, where: Path, root: Path, *options: object, **variables: str) -> list[int]:
    """Runs both ranks to their ends. Returns their exit codes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    where.mkdir(exist_ok=True)
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    ranks = [
        launch(
            python,
            PROGRAM,
            root,
            *options,
            where=where,
            RANK=str(rank),
            LOCAL_RANK=str(rank),
            DS_ACCELERATOR="cpu",
            **shared,
            **variables,
        )
        for rank in range(2)
    ]
    try:
        return [rank.wait(150) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()


def ended(where: Path) -> list[str]:
    return [lines(where, PROGRAM, rank)["digest"] for rank in range(2)]


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], list[str]]:
    """Returns the ends of a training by DeepSpeed alone."""

    @cache
    def end(stage: int) -> list[str]:
        where = tmp_path_factory.mktemp("unbroken")
        assert train(environment("deepspeed"), where, where / "run", "--stage", stage, "--alone") == [0, 0]
        return ended(where)

    return end


@pytest.mark.timeout(600)
@pytest.mark.parametrize("stage", [1, pytest.param(3, marks=pytest.mark.campaign(seconds=25))])
def test_killed_right_after_a_save(
    stage: int, memory: Path, tmp_path: Path, unbroken: Callable[[int], list[str]]
) -> None:
    """Storage has none of it yet: the step comes from memory. At the end DeepSpeed's own tool reads the files."""
    python, root = environment("deepspeed"), tmp_path / "run"
    slow = {"REKINDLE_FILES_DRAIN_LIMIT": "1KB/s", LAUNCH: str(tmp_path)}
    assert 0 not in train(python, tmp_path / "broken", root, "--stage", stage, "--die-after-save", 3, **slow)
    assert (tmp_path / IMPORTS).exists()  # a restart by the launcher would be warm
    assert not (root / "latest").exists() or (root / "latest").read_text() != "global_step3"
    files = list((root / "global_step3").glob("*.pt"))
    assert len(files) == {1: 3, 3: 4}[stage] and all(is_placeholder(file.read_bytes()[:64]) for file in files)
    assert train(python, tmp_path / "resumed", root, "--stage", stage) == [0, 0]
    assert [lines(tmp_path / "resumed", PROGRAM, rank)["start"] for rank in range(2)] == ["3", "3"]
    assert ended(tmp_path / "resumed") == unbroken(stage)
    assert (root / "latest").read_text() == "global_step5"
    assert int(lines(tmp_path / "resumed", PROGRAM)["converted"]) > 0
    for file in root.glob("global_step*/*.pt"):
        assert zipfile.ZipFile(file).testzip() is None


@pytest.mark.campaign(seconds=25)
@pytest.mark.timeout(600)
@pytest.mark.parametrize("stage", [1, 3])
def test_a_copy_that_is_made_during_the_next_step_has_the_step_it_was_made_for(
    stage: int, memory: Path, tmp_path: Path, unbroken: Callable[[int], list[str]]
) -> None:
    """Copies begin when batch norm has counted the next batch, and the user has changed a tensor. The update waits."""
    python, root = environment("deepspeed"), tmp_path / "run"
    assert 0 not in train(python, tmp_path / "broken", root, "--stage", stage, "--late", "--die-after-update", 4)
    assert train(python, tmp_path / "resumed", root, "--stage", stage) == [0, 0]
    assert lines(tmp_path / "resumed", PROGRAM)["start"] == "3"
    assert ended(tmp_path / "resumed") == unbroken(stage)
