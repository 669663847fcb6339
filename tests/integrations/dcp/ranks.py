"""Real ranks: processes of their own that talk over gloo. What they return, or how they failed, comes back."""

from __future__ import annotations

import os
import tempfile
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.faults.harness import finish
from tests.fork_server import context


def ranks(world: int, work: Callable[..., Any], *args: Any) -> list[Any]:
    """What ``work(rank, *args)`` returns on each of ``world`` ranks. An exception in one of them fails the caller."""
    results, codes = attempt(world, work, *args)
    assert codes == [0] * world, "\n".join(str(result) for result in results)
    return results


def attempt(world: int, work: Callable[..., Any], *args: Any) -> tuple[list[Any], list[int | None]]:
    """What each rank returned, or its traceback, or None; and its exit code, negative for a signal."""
    with tempfile.TemporaryDirectory() as place:
        pipes, processes = [], []
        for rank in range(world):
            receive, send = context.Pipe(duplex=False)
            process = context.Process(target=_rank, args=(rank, world, place, dict(os.environ), send, work, args))
            process.start()
            send.close()
            pipes.append(receive)
            processes.append(process)
        results = [_receive(pipe) for pipe in pipes]
        return results, finish(processes)


def _receive(pipe: Any) -> Any:
    try:
        return pipe.recv() if pipe.poll(150.0) else "no answer within 150 s"
    except EOFError:
        return None


def _rank(
    rank: int,
    world: int,
    place: str,
    environment: dict[str, str],
    pipe: Any,
    work: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    import torch
    import torch.distributed as dist

    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    os.environ.update(environment, LOCAL_WORLD_SIZE=str(world))  # the server's is that of an earlier test
    dist.init_process_group("gloo", init_method=f"file://{place}/store", rank=rank, world_size=world)
    try:
        result, code = work(rank, *args), 0
    except BaseException:
        result, code = f"rank {rank}: {traceback.format_exc()}", 1
    pipe.send(result)
    pipe.close()
    if not code:
        dist.barrier()
    os._exit(code)


def flip(path: Path, at: int) -> None:
    """Change one bit of a file."""
    with open(path, "r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1]))
