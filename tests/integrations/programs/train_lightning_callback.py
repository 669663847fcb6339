"""Trains by Lightning's Trainer with RekindleCallback, and dies or goes on.

train_lightning_callback.py ROOT [--alone] [--devices N] [--die-before N [--die-rank N]] [--manual] [--workers N] ...
"""

from __future__ import annotations

import argparse
import json
import logging
import os
from pathlib import Path

import lightning
import torch
import torchmetrics
from digests import digest
from dying import die
from lightning.pytorch.callbacks import Callback, EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import Logger
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

from rekindle.integrations.lightning import RekindleCallback

options = argparse.ArgumentParser()
options.add_argument("root")
options.add_argument("--alone", action="store_true", help="trains without Rekindle")
options.add_argument("--devices", type=int, default=1)
options.add_argument("--strategy", default="ddp", help="of several ranks: ddp, fsdp or model_parallel")
options.add_argument("--die-before", type=int, help="the update that is not made any more")
options.add_argument("--die-rank", type=int, help="the rank that dies; all do without it")
options.add_argument("--die-validating", action="store_true", help="dies in the validation behind that update")
options.add_argument("--signal", default="KILL", help="dies by it")
options.add_argument("--manual", action="store_true", help="trains by two optimizers")
options.add_argument("--workers", type=int, default=0)
options.add_argument("--batch", type=int, default=4, help="examples of a batch")
options.add_argument("--persistent", action="store_true", help="keeps the workers")
options.add_argument("--iterable", action="store_true", help="takes data without a length")
options.add_argument("--max-steps", type=int, default=-1)
options.add_argument("--patience", type=int, default=100)
options.add_argument("--ckpt-path", help="goes on from a checkpoint of Lightning's own")
options.add_argument("--in-one-process", action="store_true", help="trains alone, until an error, and to the end")
given = options.parse_args()
rank = int(os.environ.get("LOCAL_RANK", 0))
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


def tell_line(text):
    """Prints a line of its own, even where the other rank's libraries have written a part of one: both share a file."""
    print(f"\n{text}", flush=True)


class Die(Exception):
    pass


class Dying(Callback):
    def on_before_optimizer_step(self, trainer, module, optimizer):
        if not given.die_validating:
            self.die(trainer.global_step + 1)

    def on_validation_batch_start(self, trainer, *others):
        if given.die_validating:
            self.die(trainer.global_step)

    def die(self, step):
        if step == given.die_before and given.die_rank in (None, rank):
            if given.in_one_process:
                raise Die
            die(given.signal)


class FsdpOnCpu(FSDPStrategy):
    """Lightning's own, which is refused without a GPU if it is of that very class, and gives FSDP a GPU's number."""

    def _setup_model(self, model):
        return super()._setup_model(FullyShardedDataParallel(model, device_id=torch.device("cpu"), **self.kwargs))


class Printed(Logger):
    name, version = "printed", 0

    def log_hyperparams(self, *args, **others):
        pass

    def log_metrics(self, metrics, step=None):
        if rank == 0:
            tell_line(f"log:{step}:{'+'.join(metrics)} {json.dumps(metrics)}")


class Rows(torch.utils.data.Dataset):
    """Draws random numbers wherever it is read: in a worker, or between those of training.

    Not in workers that are kept: what they draw in a later epoch depends on all that they have drawn before.
    """

    def __len__(self):
        return 44

    def __getitem__(self, index):
        row = torch.linspace(index, index + 1, 8) / 44
        return row if given.persistent else row + torch.randn(8) / 8


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return (Rows()[index] for index in torch.randperm(44).tolist()[rank :: given.devices])


class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        dense = torch.nn.Linear
        self.head = torch.nn.Sequential(dense(8, 16), torch.nn.Dropout(0.2), torch.nn.BatchNorm1d(16))
        self.tail = dense(16, 8)
        self.seen = torchmetrics.MeanMetric()
        self.automatic_optimization = not given.manual

    def configure_model(self):
        if given.strategy == "model_parallel":
            for part in (self.head, self.tail):
                fully_shard(part, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch, number):
        loss = (self.tail(self.head(batch)) - batch).square().mean()
        if given.manual:
            self.manual_backward(loss)
            if (number + 1) % 2 == 0:
                for optimizer in self.optimizers():
                    optimizer.step()
                    optimizer.zero_grad()
                for schedule in self.lr_schedulers():
                    schedule.step()
        self.log("loss", loss, on_step=True, on_epoch=True)
        if number % 3 == 0:
            self.log("now_and_then", loss, on_step=True, on_epoch=True)
        self.seen(loss)
        self.log("seen", self.seen, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch, number):
        self.log("val_loss", (self.tail(self.head(batch)) - batch).square().mean(), sync_dist=True)

    def configure_optimizers(self):
        if not given.manual:
            optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
            schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 40)
            return [optimizer], [{"scheduler": schedule, "interval": "step"}]
        both = [torch.optim.SGD(self.head.parameters(), lr=1e-2), torch.optim.AdamW(self.tail.parameters(), lr=1e-2)]
        return both, [torch.optim.lr_scheduler.StepLR(one, 3) for one in both]


def strategy():
    if given.devices == 1:
        return "auto"
    if given.strategy == "fsdp":
        return FsdpOnCpu(state_dict_type="sharded")
    if given.strategy == "model_parallel":
        return ModelParallelStrategy(data_parallel_size=given.devices, tensor_parallel_size=1)
    return given.strategy


def loader(shuffle):
    data = Stream() if given.iterable and shuffle else Rows()
    return torch.utils.data.DataLoader(
        data,
        batch_size=given.batch,
        shuffle=shuffle and not given.iterable,
        num_workers=given.workers,
        persistent_workers=given.persistent,
    )


def train(callbacks):
    lightning.seed_everything(3)
    model = Model()
    own = ModelCheckpoint(Path(given.root).parent / "own", "{step}", save_top_k=-1, every_n_train_steps=3)
    stopping = EarlyStopping("val_loss", patience=given.patience, mode="max")
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=given.devices,
        strategy=strategy(),
        max_epochs=3,
        max_steps=given.max_steps,
        accumulate_grad_batches=1 if given.manual else 2,
        val_check_interval=1.0 if given.iterable else 4,
        log_every_n_steps=2,
        callbacks=[*callbacks, own, stopping],
        logger=Printed(),
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, loader(True), loader(False), ckpt_path=given.ckpt_path)
    return trainer, stopping


def tell(trainer, stopping):
    model = trainer.lightning_module
    ends = {
        "steps": [trainer.global_step, trainer.current_epoch, stopping.wait_count],
        "weights": digest(model.state_dict()),
        "optimizer": digest([optimizer.state_dict() for optimizer in trainer.optimizers]),
        "schedule": digest([config.scheduler.state_dict() for config in trainer.lr_scheduler_configs]),
        "newest": json.dumps({name: value.item() for name, value in sorted(trainer.callback_metrics.items())}),
    }
    for name, end in ends.items():
        tell_line(f"{name}:{rank} {end}")


if given.in_one_process:
    tell(*train([]))
    try:
        train([RekindleCallback(given.root), Dying()])
    except Die:
        given.die_before = None
callback = RekindleCallback(given.root, overlap=True)
trainer, stopping = train([Dying()] if given.alone else [callback, Dying()])
if not given.alone:
    metrics = callback.checkpointer.metrics
    tell_line(f"start:{rank} {metrics.restored_step} {metrics.restored_from}")
tell(trainer, stopping)
