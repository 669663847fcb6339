"""Loads what connects this agent with those of other nodes, once a trainer has named an address to listen on.

Most jobs train on one node: their agents save the time and the memory.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from rekindle.agent.monitor import RankMonitor
from rekindle.agent.ticks import next_tick
from rekindle.errors import FormatError
from rekindle.memory.job_dir import JobDir
from rekindle.memory.mark import mark_of

__all__ = ["serve_mesh"]

log = logging.getLogger("rekindle.agent")

_TICK = 0.1
"""Seconds between two looks at ``job.json``: trainers that wait for an address are held up that long."""

_AGAIN = 1.0
"""Seconds after which what could not be loaded is tried again."""


async def serve_mesh(
    job: JobDir, monitor: RankMonitor, durable: Callable[[], int], stop: Callable[[bool], dict[str, Any]]
) -> None:
    """Serves as ``rekindle.agent.mesh_keeper.MeshKeeper`` does, as soon as the job needs it, until cancelled."""
    mark = None
    while True:
        found = mark_of(job.paths.job)
        with suppress(OSError, FormatError):  # the drain reports it; the next look tries again
            if found != mark and _has_host(job):
                break
            mark = found  # a job on one node does no more than this, for as long as it trains
        await next_tick(_TICK)
    module: Any = None
    warned = False
    while module is None:
        try:  # in a thread: faults are noticed meanwhile
            module = await asyncio.to_thread(importlib.import_module, "rekindle.agent.mesh_keeper")
        except Exception as error:  # no memory, no open files
            if not warned:
                log.warning("faults on other nodes are noticed late here: %s: %s", type(error).__name__, error)
            warned = True
            await asyncio.sleep(_AGAIN)
    await module.MeshKeeper(job, monitor, durable, stop).serve()


def _has_host(job: JobDir) -> bool:
    info = job.read_job()
    return info is not None and bool(info.host)
