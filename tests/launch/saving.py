"""Saves a little and waits for its end: saving.py ROOT (save | dcp). The second way is through DCP.

It notes in ``starts`` the process and the time of each start, and in ``stepped`` the number of each that has saved.
"""

import os
import sys
import time

import torch
import torch.distributed.checkpoint as dcp

import rekindle
from rekindle.integrations.dcp import RekindleWriter

COUNT = int(os.environ["TORCHELASTIC_RESTART_COUNT"])


def save(root: str, how: str) -> None:
    first = COUNT * 10 + 1
    if how == "dcp":
        writer = RekindleWriter(root)
        dcp.save({"x": torch.ones(4)}, checkpoint_id=f"step-{first}", storage_writer=writer, no_dist=True)
        return
    ckpt = rekindle.Checkpointer(root, {"model": torch.nn.Linear(2, 2)})
    ckpt.restore()
    for step in (first, first + 1):
        ckpt.save(step, wait="memory")


with open("starts", "a") as file:
    file.write(f"{os.getpid()} {time.monotonic()}\n")
save(*sys.argv[1:])
with open("stepped", "a") as file:
    file.write(f"{COUNT}\n")
deadline = time.monotonic() + 300
while time.monotonic() < deadline:
    time.sleep(0.02)
