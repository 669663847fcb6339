"""Writes a checkpoint and a memory store to be held: later code has to restore both.

``python -m tests.held.make NAME.tar.gz`` trains two ranks with this Rekindle, kills them and their agent
once step 2 is on storage and step 3 in memory alone, and packs ``run`` and ``memory``. A held file is never made again:
it stands for what that version has left on people's disks.
"""

from __future__ import annotations

import os
import signal
import sys
import tarfile
import tempfile
from collections import OrderedDict, deque
from datetime import date
from pathlib import Path, PurePosixPath
from typing import Any

import torch

import rekindle
from rekindle.memory.lock import Lock
from tests.faults.harness import wait_for
from tests.fork_server import context

WORLD = 2
DURABLE, IN_MEMORY = 2, 3


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(11, 8)
        self.conv = torch.nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
        self.half = torch.nn.Linear(8, 8, dtype=torch.bfloat16)
        self.head = torch.nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight  # tied
        self.register_buffer("empty", torch.empty(0, 3))
        self.register_buffer("flags", torch.zeros(5, dtype=torch.bool))


def state_of(step: int, rank: int) -> dict[str, Any]:
    """The state of ``step``, each element by a formula that no machine rounds otherwise."""
    torch.manual_seed(0)
    net = Net()
    optimizer = torch.optim.AdamW([{"params": net.conv.parameters()}, {"params": [net.embed.weight], "lr": 0.5}])
    for parameter in net.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    number = 0
    tensors = [*net.state_dict().values()]
    tensors += [value for entry in optimizer.state.values() for value in entry.values()]
    with torch.no_grad():
        for number, tensor in enumerate(tensors):
            pattern = (torch.arange(tensor.numel()) * 3 + 7 * number + 64 * step) % 251
            tensor.copy_(pattern.reshape(tensor.shape).to(tensor.dtype))
    values = rekindle.Values(
        step=step,
        ratio=0.1 * step,
        rank=rank,
        name="h\u00e4ld/\u2603",
        raw=b"\x00\xff",
        when=date(2026, 11, step),
        path=PurePosixPath("a/b"),
        order=OrderedDict(z=1, a=(2, [3, None])),
        recent=deque([1.5, step], maxlen=4),
        losses=[float(n) for n in range(100)],
        odd={"$tensor": {"a#0": torch.full((2,), step)}, 7: {1, 2}},
    )
    return {"model": net, "optimizer": optimizer, "values": values}


def _train(rank: int, root: Path, memory: Path) -> None:
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{root.parent}/meeting", rank=rank, world_size=WORLD)
    state = state_of(1, rank)
    ckpt = rekindle.Checkpointer(root, state, memory=memory, persist_seconds=3600, rng=False)
    ckpt.restore()
    with ckpt.guard():
        for step in range(1, IN_MEMORY + 1):
            new = state_of(step, rank)
            for name in ("model", "optimizer", "values"):
                state[name].load_state_dict(new[name].state_dict())
            if step == DURABLE:
                ckpt.save(step, wait="durable", pin=True)
            ckpt.step(step)
        dist.barrier()
        (root.parent / f"done-{rank}").touch()
        signal.pause()


def main(out: Path) -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
        place = Path(name)
        ranks = [context.Process(target=_train, args=(r, place / "run", place / "memory")) for r in range(WORLD)]
        for process in ranks:
            process.start()
        wait_for(lambda: all((place / f"done-{rank}").exists() for rank in range(WORLD)), 120)
        (lock,) = place.glob("memory/rekindle-*/*/agent.lock")
        agent = Lock.holder(lock)
        assert agent is not None
        for pid in (agent, *(process.pid for process in ranks)):
            os.kill(pid, signal.SIGKILL)
        for process in ranks:
            process.join()
        with tarfile.open(out, "w:gz") as file:
            for part in ("run", "memory"):
                file.add(place / part, part, filter=lambda info: None if info.name.endswith(".sock") else info)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
