"""Trains a compiled model until the file ``end`` is there: compiled.py ROOT.

It writes a line to ``firsts`` in each start, after its first step: the number of the start, hits and misses of
torch's caches of graphs, and the seconds of that step.
"""

import os
import sys
import time

import torch
from torch._dynamo.utils import counters

import rekindle


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = torch.nn.Linear(32, 32), torch.nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.nn.functional.gelu(self.first(x)).sin())


def main() -> None:
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    train = torch.compile(model)
    deadline = time.monotonic() + 600
    with rekindle.Checkpointer(sys.argv[1], {"model": model, "optimizer": optimizer}, persist_seconds=0.1) as ckpt:
        first = ckpt.restore() + 1
        for step in range(first, first + 1_000_000):
            began = time.monotonic()
            train(torch.ones(4, 32)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            ckpt.step(step)
            if step == first:
                start = os.environ["TORCHELASTIC_RESTART_COUNT"]
                found = {**counters["aot_autograd"], **counters["inductor"]}
                hits, misses = (
                    sum(count for name, count in found.items() if name.endswith(f"_cache_{what}"))
                    for what in ("hit", "miss")
                )
                with open("firsts", "a") as file:
                    file.write(f"{start} {hits} {misses} {time.monotonic() - began:.3f}\n")
            if os.path.exists("end"):
                break
            if time.monotonic() > deadline:
                sys.exit("nobody has ended it")
            time.sleep(0.02)


if __name__ == "__main__":
    main()
