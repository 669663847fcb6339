"""A rank that doesn't come to the start of a job, or ends there: the others are told which, in bounded time."""

from __future__ import annotations

import os
import re
import signal
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist
from torch.distributed import distributed_c10d

import rekindle
from rekindle.session import rendezvous
from tests.faults.harness import wait_for
from tests.fork_server import context
from tests.test_checkpointer import Training


def _rank(rank: int, root: Path, memory: Path, fate: str) -> None:
    store, options = f"file://{root.parent}/rendezvous", {}
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2, timeout=timedelta(minutes=10))
    if fate == "late":  # not before: on a busy machine it takes long until both are there
        distributed_c10d._set_pg_timeout(timedelta(seconds=2))
    if rank == 1 and fate == "late":
        signal.pause()
    if rank == 1 and fate == "refused":
        options = {"keep": 0}
    if rank == 1 and fate == "killed":
        rendezvous.take_inventory = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment]
    try:
        rekindle.Checkpointer(root, Training().state, memory=memory, **options)  # type: ignore[arg-type]
    except Exception as error:
        (root.parent / f"told-{rank}.tmp").write_text(f"{type(error).__name__}: {error}")
        (root.parent / f"told-{rank}.tmp").rename(root.parent / f"told-{rank}")
    os._exit(0)


@pytest.mark.parametrize("fate", ["late", "refused", "killed"])
def test_a_rank_that_is_missing_at_the_start_is_told_of(fate: str, root: Path, memory: Path) -> None:
    ranks = [context.Process(target=_rank, args=(rank, root, memory, fate)) for rank in range(2)]
    for process in ranks:
        process.start()
    try:
        wait_for((root.parent / "told-0").exists, 120, "rank 0 to be told")
    finally:
        for process in ranks:
            process.kill()
            process.join()
    told = (root.parent / "told-0").read_text()
    # Torch names the one that lives, and the one that has ended only if rank 0 was there before.
    who = r"rank\(s\) 1" if fate == "late" else r"(rank\(s\) 1|a rank of 2)"
    assert re.match(rf"MissingRankError: {who} did not come to a meeting of all ranks of this job", told), told
    assert "see the log of that rank" in told
