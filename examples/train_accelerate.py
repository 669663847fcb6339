"""Trains a small network by a loop of Accelerate's kind, and survives faults.

    python examples/train_accelerate.py runs/acc                              one process
    torchrun --nproc-per-node 2 examples/train_accelerate.py runs/acc         two ranks; or accelerate launch

Kill it in any way you like, and start it again by the same command: it goes on behind the last completed step.
"""

import logging
import sys

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed

from rekindle.integrations.accelerate import checkpointer

EPOCHS = 5


def main(root: str) -> None:
    logging.basicConfig(level=logging.INFO)  # shows which step was restored, and from where
    set_seed(0)
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Dropout(0.1), torch.nn.Linear(64, 32))
    data = torch.utils.data.TensorDataset(torch.randn(4096, 32))
    loader = torch.utils.data.DataLoader(data, batch_size=16, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3), loader)

    ckpt = checkpointer(accelerator, root)
    step = ckpt.restore()
    with ckpt, ckpt.guard():
        for epoch in range(loader.iteration, EPOCHS):  # was range(EPOCHS): a restart begins in the midst of them
            for (x,) in loader:
                loss = (model(x) - x).square().mean()
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                step += 1
                ckpt.step(step)
                if step % 50 == 0:
                    accelerator.print(f"epoch {epoch}, step {step}: loss {loss.item():.4f}")
    accelerator.end_training()


if __name__ == "__main__":
    main(sys.argv[1])
