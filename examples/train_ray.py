"""Trains a small network by Ray Train, and survives faults.

    python examples/train_ray.py runs/ray --workers 2       on this machine, or on the cluster of $RAY_ADDRESS

Kill a worker in any way you like: Ray starts all of them again, and they go on behind the last completed step. So does
this script itself when it is started again by the same command.
"""

import argparse
from pathlib import Path

import ray.train
import torch
from ray.train.torch import TorchTrainer, get_device
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import rekindle
from rekindle.data import Resumable
from rekindle.integrations.ray import leave, notices, report, root

EPOCHS = 5


def train(config: dict) -> None:
    """Trains, on each worker."""
    context = ray.train.get_context()
    device = get_device()
    torch.manual_seed(context.get_world_rank())  # for dropout; DDP gives all ranks the weights of rank 0
    model = nn.Sequential(nn.Linear(32, 64), nn.Dropout(0.1), nn.Linear(64, 32)).to(device)
    parallel = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    rows = TensorDataset(torch.randn(4096, 32, generator=torch.Generator().manual_seed(0)))
    sampler = DistributedSampler(rows, context.get_world_size(), context.get_world_rank())
    data = Resumable(DataLoader(rows, batch_size=16, sampler=sampler))

    ckpt = rekindle.Checkpointer(root(), {"model": model, "optimizer": optimizer, "data": data})
    step = ckpt.restore()
    with ckpt, ckpt.guard(notices=notices(), on_exit=leave):
        for _epoch in range(data.epoch, EPOCHS):
            for (x,) in data:
                x = x.to(device)
                loss = nn.functional.mse_loss(parallel(x), x)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                step += 1
                ckpt.step(step)
                if step % 64 == 0:
                    report(ckpt, {"step": step, "loss": loss.item()})
    report(ckpt, {"step": step})  # the last step is on storage now: Ray's Result names it


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a small network by Ray Train.")
    parser.add_argument("run", type=Path, help="directory of the run, on a file system that all nodes share")
    parser.add_argument("--workers", type=int, default=1, help="ranks in all (default: %(default)s)")
    args = parser.parse_args()

    run = args.run.absolute()  # workers have other directories
    result = TorchTrainer(
        train,
        scaling_config=ray.train.ScalingConfig(num_workers=args.workers, use_gpu=torch.cuda.is_available()),
        run_config=ray.train.RunConfig(
            name=run.name,
            storage_path=str(run.parent),
            failure_config=ray.train.FailureConfig(max_failures=10),
        ),
    ).fit()
    print(result.metrics)


if __name__ == "__main__":
    main()
