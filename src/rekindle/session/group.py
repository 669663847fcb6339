"""Lets the ranks of a job agree, for the few moments at which they must. Nothing here is used while training runs."""

from __future__ import annotations

import math
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from rekindle.common.environ import env_count
from rekindle.errors import RekindleError, UsageError

__all__ = ["MissingRankError", "SingleProcess", "ProcessGroup", "this_group"]

_MISSING = re.compile(r"[Rr]anks? ([0-9][0-9, ]*) failed to pass monitoredBarrier")
"""Torch's words for ranks that don't come to a monitored barrier, as rank 0 has them. It has none for a rank whose
process ended before rank 0 came."""


class SingleProcess:
    """The only rank of a job without a process group."""

    rank = 0
    world = 1
    seconds = math.inf

    def await_all(self) -> None:
        return None

    def gather(self, value: Any) -> list[Any]:
        return [value]

    def barrier(self) -> None:
        return None


class MissingRankError(RekindleError, RuntimeError):
    """A rank ended or failed, or did not come, while all ranks had to agree. Its own log tells why."""


class ProcessGroup:
    """All ranks of an initialised process group. Each call is a collective.

    A call raises MissingRankError where a rank doesn't take part. It waits for that as long as the user's process group
    does if that is gloo's, else ``timeout``.
    """

    def __init__(self, timeout: timedelta) -> None:
        self.rank = dist.get_rank()
        self.world = dist.get_world_size()
        # Objects travel on the host; a group that only speaks for devices gets a host twin.
        on_host = "gloo" in dist.get_backend() or "cpu" in str(dist.get_backend_config())
        self._timeout = (_gloo_timeout() if on_host else None) or timeout
        with self._ranks_missed():
            self._group = None if on_host else dist.new_group(backend="gloo", timeout=timeout)

    @property
    def seconds(self) -> float:
        """Seconds for which the other ranks wait for one that takes its time."""
        return self._timeout.total_seconds()

    def await_all(self) -> None:
        """Waits for all ranks. The error of rank 0 names those that don't come, where torch does."""
        if dist.get_backend(self._group) != "gloo":  # the next call waits as well, and can't name them
            return
        with self._ranks_missed():
            dist.monitored_barrier(self._group, self._timeout, wait_all_ranks=True)

    @contextmanager
    def _ranks_missed(self) -> Iterator[None]:
        """Turns the errors of torch's collectives into MissingRankError."""
        began = time.monotonic()
        try:
            yield
        except RuntimeError as error:
            named = _MISSING.search(str(error))
            unnamed = f"a rank of {self.world}" + (" (rank 0's error may name it)" if self.rank else "")
            who = f"rank(s) {named[1]}" if named else unnamed
            raise MissingRankError(
                f"{who} did not come to a meeting of all ranks of this job, or ended in it (rank {self.rank} has "
                f"waited {time.monotonic() - began:.0f} s): see the log of that rank, and start all ranks again"
            ) from error

    def gather(self, value: Any) -> list[Any]:
        """Returns the ``value`` of every rank, in rank order."""
        found: list[Any] = [None] * self.world
        with self._ranks_missed():
            dist.all_gather_object(found, value, group=self._group)
        return found

    def barrier(self) -> None:
        """Waits for all ranks."""
        with self._ranks_missed():
            dist.barrier(group=self._group)

    def broadcast(self, data: torch.Tensor, source: int) -> Callable[[], object]:
        """Begins to send ``data``, on the host, from rank ``source`` to all others. The result waits for the end."""
        work = dist.broadcast(data, source, group=self._group, async_op=True)
        assert work is not None

        def wait() -> None:
            with self._ranks_missed():
                work.wait(self._timeout)

        return wait

    @contextmanager
    def parts(self, parts: Sequence[list[int]]) -> Iterator[ProcessGroup | None]:
        """Makes a group of each of ``parts``, and gives this rank's; None if it is in none. A collective of all ranks.

        The groups last as long as the context. Torch can make one by its members alone, but names it by the number of
        groups that a member is in: ranks in which that differs would wait for each other.
        """
        own = None
        with self._ranks_missed():
            for ranks in parts:
                made = dist.new_group(ranks, self._timeout, "gloo")
                own = _Part(made, ranks, self._timeout) if self.rank in ranks else own
        try:
            yield own
        finally:
            if own is not None:
                dist.destroy_process_group(own._group)


class _Part(ProcessGroup):
    """Some ranks of a process group, with numbers of their own."""

    def __init__(self, group: Any, ranks: list[int], timeout: timedelta) -> None:
        self.rank, self.world = ranks.index(dist.get_rank()), len(ranks)
        self._group, self._ranks, self._timeout = group, ranks, timeout

    def broadcast(self, data: torch.Tensor, source: int) -> Callable[[], object]:
        return super().broadcast(data, self._ranks[source])


def _gloo_timeout() -> timedelta | None:
    """Returns the timeout of the process group's own gloo; None where torch doesn't tell."""
    group: Any = dist.group.WORLD
    with suppress(AttributeError, RuntimeError):
        found = group._get_backend(torch.device("cpu")).options._timeout
        return found if isinstance(found, timedelta) else None
    return None


def this_group(timeout: timedelta = timedelta(minutes=5)) -> SingleProcess | ProcessGroup:
    """Returns the process group, or the single process. Raises UsageError if a launcher made several ranks without
    one."""
    env_count("LOCAL_WORLD_SIZE")  # used later, but refused here, before this rank has its place in the job
    if dist.is_available() and dist.is_initialized():
        return ProcessGroup(timeout)
    world = env_count("WORLD_SIZE")
    if world > 1:
        raise UsageError(
            f"this is rank {os.environ.get('RANK', '?')} of {world}, but torch.distributed is not initialised: "
            "call torch.distributed.init_process_group() first"
        )
    return SingleProcess()
