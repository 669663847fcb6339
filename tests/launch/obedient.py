"""Trains until it is told how to end: obedient.py ROOT [IMPORT]...

It does what the file ``order`` says, and takes that away. It notes in ``starts`` the process and the monotonic time of
each start, when its code is run; in ``objects`` how many objects the garbage collector looks at then; in ``stepped``
the number of each start that has come as far as its third step. The start whose number is in the name of a file
``fail-N`` fails at once; that of ``unlike-N`` has another model.
"""

import gc
import importlib
import os
import sys
import time
from pathlib import Path

COUNT = os.environ["TORCHELASTIC_RESTART_COUNT"]
with open("starts", "a") as file:
    file.write(f"{os.getpid()} {time.monotonic()}\n")
with open("objects", "a") as file:
    file.write(f"{len(gc.get_objects())}\n")
if os.path.exists(f"fail-{COUNT}"):
    sys.exit(9)
if name := os.environ.get("SET_BY_SCRIPT"):
    os.environ[name] = "1"

import torch  # noqa: E402  # the variable is set before the import

import rekindle  # noqa: E402

for name in sys.argv[2:]:
    importlib.import_module(name)


def obey(order: str) -> None:
    os.unlink("order")
    if order == "end":
        sys.exit(0)
    if order.isdecimal():
        os._exit(int(order))
    os.kill(os.getpid(), getattr(__import__("signal"), order))


def main() -> None:
    width = 5 if os.path.exists(f"unlike-{COUNT}") else 4
    model = torch.nn.Linear(4, width)
    optimizer = torch.optim.AdamW(model.parameters())
    deadline = time.monotonic() + 300
    with rekindle.Checkpointer(sys.argv[1], {"model": model, "optimizer": optimizer}) as ckpt:
        first = ckpt.restore()
        for step in range(first + 1, first + 100_000):
            model(torch.ones(1, 4)).sum().backward()
            optimizer.step()
            ckpt.step(step)
            if step == first + 3:
                with open("stepped", "a") as file:
                    file.write(f"{COUNT}\n")
            if os.path.exists("order"):
                obey(Path("order").read_text())
            if time.monotonic() > deadline:
                sys.exit("no order came")
            time.sleep(0.02)


if __name__ == "__main__":
    main()
