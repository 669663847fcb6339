"""Trains by a loop of Accelerate's kind, and dies or goes on.

train_accelerate.py ROOT [--alone] [--die-before N [--die-rank N]] [--workers N] [--unseeded] [--iterable] ...
"""

from __future__ import annotations

import argparse
import os
import signal
from contextlib import nullcontext

import torch
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.utils import set_seed
from digests import digest

from rekindle.errors import UsageError
from rekindle.integrations.accelerate import checkpointer

EPOCHS = 3

options = argparse.ArgumentParser()
options.add_argument("root")
options.add_argument("--alone", action="store_true", help="trains without Rekindle")
options.add_argument("--die-before", type=int, help="the update that is not made any more")
options.add_argument("--die-rank", type=int, help="the rank that dies; all do without it")
options.add_argument("--workers", type=int, default=0)
options.add_argument("--batch", type=int, default=2, help="examples of a batch")
options.add_argument("--unseeded", action="store_true", help="shuffles by the generator of the sampler")
options.add_argument("--lora", action="store_true", help="trains a PEFT model")
options.add_argument("--iterable", action="store_true", help="takes data without a length")
options.add_argument("--late", action="store_true", help="prepares after the checkpointer was made, and prints errors")
options.add_argument("--every-batch", action="store_true", help="counts batches as steps, held gradients or not")
given = options.parse_args()
rank = int(os.environ.get("RANK", 0))


class Stream(torch.utils.data.IterableDataset):
    def __init__(self, rows):
        self.rows = rows

    def __iter__(self):
        return iter(self.rows)


class Seen:
    """Something of the user's own, as ``register_for_checkpointing`` takes it."""

    def __init__(self):
        self.losses = []

    def state_dict(self):
        return {"losses": list(self.losses)}

    def load_state_dict(self, state):
        self.losses = list(state["losses"])


def prepare_late(ckpt):
    """Prepares what may come late, at which a step is saved, and then what may not; prints what is told of that."""
    accelerator.prepare(torch.utils.data.DataLoader([1, 2]))
    for step in range(1, 4):
        ckpt.step(step)
    print("saved", step, flush=True)
    late = torch.nn.Linear(2, 2)
    sgd = torch.optim.SGD(late.parameters())
    accelerator.prepare(late, sgd, torch.optim.lr_scheduler.ConstantLR(sgd))
    accelerator.register_for_checkpointing(Seen())
    for call in (ckpt.restore, lambda: ckpt.step(4), lambda: ckpt.save(4)):
        try:
            call()
        except UsageError as error:
            print("late", error, flush=True)
    raise SystemExit


set_seed(3)
rows = torch.randn(44, 8)
loading = DataLoaderConfiguration(use_seedable_sampler=not given.unseeded, dispatch_batches=False)
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, dataloader_config=loading)
layers = [torch.nn.Linear(8, 16), torch.nn.Dropout(0.2), torch.nn.BatchNorm1d(16), torch.nn.Linear(16, 8)]
model = torch.nn.Sequential(*layers)
if given.lora:
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(model, LoraConfig(r=4, lora_dropout=0.1, target_modules=["0", "3"]))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 200)
data = Stream(rows) if given.iterable else torch.utils.data.TensorDataset(rows)
loader = torch.utils.data.DataLoader(
    data, batch_size=given.batch, shuffle=None if given.iterable else True, num_workers=given.workers
)
checks = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(8, 8)), batch_size=2)
model, optimizer, schedule, loader, checks = accelerator.prepare(model, optimizer, schedule, loader, checks)
seen = Seen()
accelerator.register_for_checkpointing(seen)
ckpt, step = None, 0
if not given.alone:
    ckpt = checkpointer(accelerator, given.root, overlap=True)
    assert optimizer.optimizer._optimizer_step_pre_hooks, "no update would wait for a copy"
    if given.late:
        prepare_late(ckpt)
    step = ckpt.restore()
    print("start", step, ckpt.metrics.restored_from, flush=True)
with ckpt.guard() if ckpt is not None else nullcontext():
    for _epoch in range(loader.iteration, EPOCHS):
        for batch in loader:
            (x,) = batch if isinstance(batch, (list, tuple)) else (batch,)
            with accelerator.accumulate(model):
                loss = (model(x) - x).square().mean()
                accelerator.backward(loss)
                if accelerator.sync_gradients and step + 1 == given.die_before and given.die_rank in (None, rank):
                    os.kill(os.getpid(), signal.SIGKILL)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            seen.losses.append(loss.item())
            if accelerator.sync_gradients or given.every_batch:
                step += 1
                if ckpt is not None:
                    ckpt.step(step)
        model.eval()
        with torch.no_grad():
            seen.losses.append(sum(model(x).sum().item() for (x,) in checks))
        model.train()
if ckpt is not None:
    ckpt.close()
print("steps", step, flush=True)
print("weights", digest(accelerator.unwrap_model(model).state_dict()), flush=True)
print("optimizer", digest(optimizer.state_dict()), flush=True)
print("schedule", schedule.get_last_lr(), flush=True)
print("losses", digest(seen.losses), len(seen.losses), flush=True)
accelerator.end_training()
