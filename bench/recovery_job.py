"""The training that ``recovery.py`` kills, on CPUs. Run by a launcher: recovery_job.py rekindle|torch ROOT STEPS WIDTH.

Each rank tells every moment of its start, and a digest of its whole state after each step, to the socket that
RECOVERY_SOCKET names. Torch is imported by ``main``, so that the moment before is told too.
"""

import json
import os
import socket
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

_socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)


def connect() -> None:
    _socket.connect(os.environ["RECOVERY_SOCKET"])


def tell(kind: str, **fields: object) -> None:
    """Send one moment. CLOCK_MONOTONIC is the same for all processes of a machine."""
    told = {"kind": kind, "at": time.monotonic(), "rank": int(os.environ["RANK"]), "pid": os.getpid(), **fields}
    _socket.send(json.dumps(told).encode())


def started_at() -> float:
    """The monotonic time at which this process was started or forked, by the kernel's word: resolution is 10 ms."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    return time.monotonic() - age


def main() -> None:
    own, root, steps, width = sys.argv[1] == "torch", Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    connect()
    tell("started", at=started_at(), warm="torch" in sys.modules)
    import torch
    import torch.distributed as dist
    from recovery_model import TorchCheckpoints, digest, make, train_step

    if not own:  # else nothing of Rekindle is imported
        from rekindle import Checkpointer
    tell("imported")
    dist.init_process_group("gloo")
    dist.barrier()
    tell("grouped")
    torch.manual_seed(dist.get_rank())  # dropout and data differ from rank to rank
    model, train, optimizer = make(width)
    state = {"model": model, "optimizer": optimizer}
    ckpt: Any = TorchCheckpoints(root, state) if own else Checkpointer(root, state, snapshot_every=1)
    done = ckpt.restore()
    tell("restored", step=done)
    with nullcontext() if own else ckpt.guard():
        for step in range(done + 1, steps + 1):
            train_step(train, optimizer)
            ckpt.step(step)
            tell("step", step=step)
            tell("digest", step=step, digest=digest(model, optimizer))
    ckpt.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
