"""Real Lightning: a checkpoint is there as soon as its save has returned, and a removed one stays away."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest
import torch

from rekindle.common.environ import LAUNCH
from rekindle.faults.imports import IMPORTS
from rekindle.storage.path_place import is_placeholder
from tests.integrations.environments import launch, lines, needs_lightning

PROGRAM = "train_lightning"

pytestmark = needs_lightning


def train(where: Path, *options: object, **variables: str) -> int:
    process = launch(sys.executable, PROGRAM, *options, where=where, **variables)
    try:
        return process.wait(170)
    finally:
        process.kill()


@pytest.mark.campaign(seconds=22)
def test_a_checkpoint_of_a_trainer_that_was_killed_right_after_its_save_is_loaded_from_memory(
    memory: Path, tmp_path: Path
) -> None:
    root = tmp_path / "run"
    slow = {"REKINDLE_FILES_DRAIN_LIMIT": "1KB/s", LAUNCH: str(tmp_path), "RANK": "0"}
    assert train(tmp_path, root, "--die-after-save", 3, **slow) == -signal.SIGKILL
    assert (tmp_path / IMPORTS).exists()  # a restart by the launcher would be warm
    newest = root / "step=3.ckpt"
    assert is_placeholder(newest.read_bytes()[:64])
    assert train(tmp_path, root, "--resume", newest, "--alone", tmp_path / "unbroken") == 0
    ends = lines(tmp_path, PROGRAM)
    assert ends["digest"] == ends["alone"]
    for step in range(1, 5):  # real files, when fit() has returned
        assert torch.load(root / f"step={step}.ckpt", weights_only=True)["global_step"] == step


@pytest.mark.campaign(seconds=10)
def test_checkpoints_that_are_removed_while_they_are_on_their_way_stay_away(memory: Path, tmp_path: Path) -> None:
    root = tmp_path / "run"
    slow = {"REKINDLE_FILES_DRAIN_LIMIT": "4KB/s"}  # the first is being written while it is removed
    assert train(tmp_path, root, "--keep", 1, "--steps", 6, **slow) == 0
    assert lines(tmp_path, PROGRAM)["memory"] == "step=6.ckpt"
    assert [file.name for file in root.iterdir()] == ["step=6.ckpt"]
