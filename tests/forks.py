"""The server that forks the tests' ranks. There is one in a process, so all tests must ask for the same modules.

What it has loaded no rank has to import: the first optimizer alone takes a second or two of a core for torch._dynamo.
"""

from __future__ import annotations

import multiprocessing

__all__ = ["context"]

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
