"""Trains what ``train_ray.py`` trains, without Ray and without Rekindle.

train_plain.py EPOCHS
"""

from __future__ import annotations

import json
import sys

import torch
from digests import digest

ROWS, BATCH = 48, 4


class Task:
    """A network with dropout, its optimizer and schedule, and shuffled data, on one rank of a process group."""

    def __init__(self) -> None:
        rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
        torch.set_num_threads(1)
        torch.manual_seed(3 + rank)
        layers = [torch.nn.Linear(8, 16), torch.nn.Dropout(0.2), torch.nn.BatchNorm1d(16), torch.nn.Linear(16, 8)]
        self.model = torch.nn.Sequential(*layers)
        self.parallel = torch.nn.parallel.DistributedDataParallel(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 200)
        rows = torch.utils.data.TensorDataset(torch.randn(ROWS, 8, generator=torch.Generator().manual_seed(3)))
        self.sampler = torch.utils.data.DistributedSampler(rows, world, rank)
        self.loader = torch.utils.data.DataLoader(rows, batch_size=BATCH, sampler=self.sampler)

    def backward(self, x: torch.Tensor) -> float:
        loss = (self.parallel(x) - x).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        return loss.item()

    def update(self) -> None:
        self.optimizer.step()
        self.schedule.step()

    def end(self, losses: list[float]) -> dict:
        """Returns all that two runs must have alike."""
        return {
            "weights": digest(self.model.state_dict()),
            "optimizer": digest(self.optimizer.state_dict()),
            "schedule": [self.schedule.last_epoch, *self.schedule.get_last_lr()],
            "losses": losses,
        }


def main() -> None:
    torch.distributed.init_process_group("gloo")
    task, losses = Task(), []
    for epoch in range(int(sys.argv[1])):
        task.sampler.set_epoch(epoch)
        for (x,) in task.loader:
            losses.append(task.backward(x))
            task.update()
    print("end", json.dumps(task.end(losses)), flush=True)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
