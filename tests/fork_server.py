"""The server that forks the tests' ranks. There is one in a process, so all tests must ask for the same modules.

What it has loaded no rank has to import: the first optimizer alone takes a second or two of a core for torch._dynamo.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable
from typing import Any

__all__ = ["context", "run_and_kill"]

context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(
    [
        "torch",
        "torch._dynamo",
        "torch.distributed",
        "torch.distributed.checkpoint.state_dict",
        "torch.distributed.fsdp",
        "torch.distributed.optim",
        "torch.distributed.tensor.parallel",
        "rekindle.checkpointer",
        "rekindle.integrations.dcp",
        "tests.faults.harness",
        "tests.parallel.jobs",
        "tests.parallel.kinds",
        "tests.parallel.truth",
    ]
)


def run_and_kill(work: Callable[..., object], *args: Any, **more: Any) -> None:
    """Does some work in a process of its own, which gets SIGKILL once the work is done: it closes and says nothing."""
    process = context.Process(target=_work_and_die, args=(work, args, more))
    process.start()
    process.join(120)
    if process.is_alive():
        process.kill()
        raise AssertionError(f"{work.__name__} has not ended")
    assert process.exitcode == -signal.SIGKILL


def _work_and_die(work: Callable[..., object], args: tuple[Any, ...], more: dict[str, Any]) -> None:
    work(*args, **more)
    os.kill(os.getpid(), signal.SIGKILL)
