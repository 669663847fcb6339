"""Lightning's ``Trainer`` with the stand-in's two classes, killed and resumed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from rekindle.launch.provide import folder_of
from rekindle.memory.files_dir import FilesDir
from tests.faults.harness import wait_for
from tests.integrations.environments import needs_lightning

pytestmark = [needs_lightning, pytest.mark.campaign(seconds=18)]

_FIT = """
import os, signal, sys
import lightning.pytorch as pl
import torch
import torch_nebula as tn
from lightning.pytorch.demos.boring_classes import BoringModel

def fit(epochs, path=None):
    callback = tn.NebulaCallback(
        filename="{epoch}", save_top_k=2, monitor="epoch", mode="max",
        config_params={"persistent_storage_path": sys.argv[1], "persistent_time_interval": 0},
    )
    pl.seed_everything(1)
    trainer = pl.Trainer(
        max_epochs=epochs, limit_train_batches=2, limit_val_batches=0, accelerator="cpu", logger=False,
        enable_progress_bar=False, enable_model_summary=False,
        plugins=[tn.NebulaCheckpointIO()], callbacks=[callback],
    )
    model = BoringModel()
    trainer.fit(model, ckpt_path=path)
    return trainer, model
"""
_FIRST = """
fit(3)
os.kill(os.getpid(), signal.SIGKILL)
"""
_SECOND = """
trainer, model = fit(3, "epoch=1.ckpt")
assert trainer.current_epoch == 3 and trainer.global_step == 6
assert tn.get_latest_checkpoint().tag == "epoch=2.ckpt"
path = tn.get_latest_checkpoint_path("checkpoint", sys.argv[1])
assert torch.equal(BoringModel.load_from_checkpoint(path).layer.weight, model.layer.weight)
trainer.save_checkpoint("best.ckpt", storage_options={"is_best": True, "persist_path": sys.argv[1] + "/best"})
assert tn.get_latest_checkpoint(sys.argv[1] + "/best").tag == "best.ckpt"
"""


def run(code: str, root: Path, where: Path) -> int:
    environment = {**os.environ, "PYTHONPATH": str(folder_of("torch_nebula")), "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-c", _FIT + code, str(root)]
    done = subprocess.run(command, cwd=where, env=environment, capture_output=True, text=True, timeout=170, check=False)
    assert done.returncode in (0, -signal.SIGKILL), done.stderr
    return done.returncode


def test_a_trainer_that_is_killed_is_resumed_from_memory(store: FilesDir, root: Path, tmp_path: Path) -> None:
    assert run(_FIRST, root, tmp_path) == -signal.SIGKILL
    wait_for(lambda: (root / "epoch=2.ckpt" / "complete.txt").exists())
    first = torch.load(root / "epoch=2.ckpt" / "checkpoint", weights_only=False)["state_dict"]
    assert run(_SECOND, root, tmp_path) == 0
    second = torch.load(root / "epoch=2.ckpt" / "checkpoint", weights_only=False)["state_dict"]
    assert first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)
    assert not list(tmp_path.glob("**/epoch=0.ckpt")), "the oldest was removed"
