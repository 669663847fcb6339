"""Lets the ranks of a job agree, for the few moments at which they must. Nothing here is used while training runs."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from rekindle.common.environ import env_count
from rekindle.errors import UsageError

__all__ = ["SingleProcess", "ProcessGroup", "this_group"]


class SingleProcess:
    """The only rank of a job without a process group."""

    rank = 0
    world = 1

    def gather(self, value: Any) -> list[Any]:
        return [value]

    def barrier(self) -> None:
        return None


class ProcessGroup:
    """All ranks of an initialised process group. Each call is a collective, and bounded by ``timeout``."""

    def __init__(self, timeout: timedelta) -> None:
        self._timeout = timeout
        self.rank = dist.get_rank()
        self.world = dist.get_world_size()
        # Objects travel on the host; a group that only speaks for devices gets a host twin.
        on_host = "gloo" in dist.get_backend() or "cpu" in str(dist.get_backend_config())
        self._group = None if on_host else dist.new_group(backend="gloo", timeout=timeout)

    def gather(self, value: Any) -> list[Any]:
        """Returns the ``value`` of every rank, in rank order."""
        found: list[Any] = [None] * self.world
        dist.all_gather_object(found, value, group=self._group)
        return found

    def barrier(self) -> None:
        """Waits for all ranks."""
        dist.barrier(group=self._group)

    def broadcast(self, data: torch.Tensor, source: int) -> Callable[[], object]:
        """Begins to send ``data``, on the host, from rank ``source`` to all others. The result waits for the end."""
        work = dist.broadcast(data, source, group=self._group, async_op=True)
        assert work is not None
        return lambda: work.wait(self._timeout)


def this_group(timeout: timedelta = timedelta(minutes=5)) -> SingleProcess | ProcessGroup:
    """Returns the process group, or the single process. Raises UsageError if a launcher made several ranks without
    one."""
    if dist.is_available() and dist.is_initialized():
        return ProcessGroup(timeout)
    world = env_count("WORLD_SIZE")
    if world > 1:
        raise UsageError(
            f"this is rank {os.environ.get('RANK', '?')} of {world}, but torch.distributed is not initialised: "
            "call torch.distributed.init_process_group() first"
        )
    return SingleProcess()
