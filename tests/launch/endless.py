"""Trains on two ranks, with a collective in each step, until the file ``end`` is there: endless.py ROOT

Each rank notes in ``stepped`` the number of each start that has come as far as its third step.
"""

import os
import sys
import time

import torch
import torch.distributed as dist

import rekindle


def is_over() -> bool:
    """True on both ranks at the same step."""
    flag = torch.tensor([float(os.path.exists("end"))])
    dist.all_reduce(flag, dist.ReduceOp.MAX)
    return bool(flag.item())


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    ckpt = rekindle.Checkpointer(sys.argv[1], {"model": model, "optimizer": optimizer})
    step = first = ckpt.restore()
    deadline = time.monotonic() + 300
    with ckpt.guard() as guard:
        guard.connected(30)
        while not is_over():
            model(torch.ones(1, 4)).sum().backward()
            optimizer.step()
            step += 1
            ckpt.step(step)
            if step == first + 3:
                with open("stepped", "a") as file:
                    file.write(f"{os.environ['TORCHELASTIC_RESTART_COUNT']}\n")
            if time.monotonic() > deadline:
                raise TimeoutError("no end came")
            time.sleep(0.01)
    ckpt.close()


if __name__ == "__main__":
    main()
