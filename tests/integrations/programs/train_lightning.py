"""Trains with Lightning's ModelCheckpoint through the plugin, and dies or goes on.

train_lightning.py ROOT --steps N [--die-after-save N] [--resume PATH] [--keep N] [--alone ROOT]
"""

from __future__ import annotations

import argparse
import hashlib
import logging
import os
import signal

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

import rekindle
from rekindle.integrations.lightning import RekindleCheckpointIO

options = argparse.ArgumentParser()
options.add_argument("root")
options.add_argument("--steps", type=int, default=4)
options.add_argument("--die-after-save", type=int)
options.add_argument("--resume")
options.add_argument("--keep", type=int, default=-1)
options.add_argument("--alone", help="trains once more, from the start to the end and without the plugin")
given = options.parse_args()
logging.getLogger("lightning").setLevel(logging.ERROR)


class Plugin(RekindleCheckpointIO):
    def save_checkpoint(self, checkpoint, path, storage_options=None):
        super().save_checkpoint(checkpoint, path, storage_options)
        if checkpoint["global_step"] == given.die_after_save:
            os.kill(os.getpid(), signal.SIGKILL)


class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16), torch.nn.Linear(16, 1))

    def training_step(self, batch, _):
        x = torch.randn(8, 8, generator=torch.Generator().manual_seed(self.global_step))
        loss = self.layers(x).pow(2).mean()
        self.log("loss", -loss)  # the newest is the best
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 2)]


def train(root: str, plugins: list[Plugin], resume: str | None = None) -> str:
    """Returns a hash of the weights and the optimizer's state at the end."""
    torch.manual_seed(0)
    model = Model()
    keeping = ModelCheckpoint(root, "{step}", save_top_k=given.keep, monitor="step", mode="max", every_n_epochs=1)
    trainer = lightning.Trainer(
        max_epochs=given.steps,
        accelerator="cpu",
        callbacks=[keeping],
        plugins=plugins,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, torch.utils.data.DataLoader(torch.zeros(1, 1)), ckpt_path=resume)
    found = hashlib.sha256()
    optimizer = trainer.optimizers[0].state_dict()["state"]
    for value in [*model.state_dict().values(), *(part for state in optimizer.values() for part in state.values())]:
        found.update(value.detach().numpy().tobytes())
    return found.hexdigest()


print("digest", train(given.root, [Plugin()], given.resume), flush=True)
if given.alone:
    print("alone", train(given.alone, []), flush=True)
print("memory", *sorted(os.path.basename(kept.path) for kept in rekindle.files.status()), flush=True)
