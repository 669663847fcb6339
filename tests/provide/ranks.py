"""Ranks as real processes with ``torch.distributed``, which share one node or have one each."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.fork_server import context

__all__ = ["run_ranks"]


def run_ranks(work: Callable[..., object], place: Path, memories: list[Path], *args: Any) -> list[int | None]:
    """Calls ``work(rank, *args)`` in a process for each of ``memories``. Returns the exit codes."""
    rendezvous = place / f"rendezvous-{len(list(place.glob('rendezvous-*')))}"
    processes = [
        context.Process(target=_rank, args=(work, rank, memories, str(rendezvous), args))
        for rank in range(len(memories))
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
    hung = [process for process in processes if process.is_alive()]
    for process in hung:
        process.kill()
    assert not hung, "a rank hangs"
    return [process.exitcode for process in processes]


def _rank(work: Callable[..., object], rank: int, memories: list[Path], rendezvous: str, args: tuple[Any, ...]) -> None:
    import torch.distributed as dist

    world = len(memories)
    local = memories.count(memories[rank])
    os.environ.update(REKINDLE_MEMORY=str(memories[rank]), RANK=str(rank), WORLD_SIZE=str(world))
    os.environ["LOCAL_WORLD_SIZE"] = str(local)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world)
    work(rank, *args)
    dist.destroy_process_group()
