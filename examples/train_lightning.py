"""Trains a small network by Lightning's Trainer, and survives faults.

    python examples/train_lightning.py runs/pl           one process
    python examples/train_lightning.py runs/pl 2         two ranks, which Lightning starts; or torchrun

Kill it in any way you like, and start it again by the same command: it goes on behind the last completed step.
"""

import logging
import sys

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from rekindle.integrations.lightning import RekindleCallback


class Network(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Dropout(0.1), torch.nn.Linear(64, 32))

    def training_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
        (x,) = batch
        loss = (self.layers(x) - x).square().mean()
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def main(root: str, devices: int) -> None:
    logging.basicConfig(level=logging.INFO)  # a line tells which step a start goes on from, and where that was
    lightning.seed_everything(0)
    data = torch.utils.data.TensorDataset(torch.randn(4096, 32))
    trainer = lightning.Trainer(
        devices=devices,
        strategy="ddp" if devices > 1 else "auto",
        max_epochs=5,
        callbacks=[
            ModelCheckpoint(dirpath=f"{root}-best", monitor="loss"),  # without dirpath its best is lost at a restart
            RekindleCallback(root),
        ],
    )
    trainer.fit(Network(), torch.utils.data.DataLoader(data, batch_size=16, shuffle=True))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 1)
