"""Warns, on one worker of each node, of what a Ray cluster does to agents and to memory."""

from __future__ import annotations

import importlib
import logging
import os
from functools import cache
from typing import Any

from rekindle.integrations.versions import warn_if_untested
from rekindle.memory.job_dir import memory_base
from rekindle.save.metrics import Metrics

__all__ = ["describe_shortage", "is_local", "warn_of_cluster", "warn_of_objects"]

log = logging.getLogger("rekindle")

_TESTED = ("2.60", "2.60")
"""First and last series of Ray that the tests have run with."""
_SUBREAPER = "RAY_kill_child_processes_on_worker_exit_with_raylet_subreaper"
_SHARED = "/dev/shm"
"""File system of Ray's object store."""
_SNAPSHOTS = 3
"""Most snapshots of each rank that memory holds: two, and one more while one is being drained."""


def is_local(context: Any) -> bool:
    """True if Ray Train runs in local mode: in the driver's main thread, without a directory of the run."""
    try:
        context.get_storage()
    except NotImplementedError:
        return True
    return False


@cache
def warn_of_cluster() -> None:
    """Warns of a version that was not tested, and of a cluster that kills agents. Once in each process."""
    if importlib.import_module("ray.train").get_context().get_local_rank() != 0:
        return
    warn_if_untested("ray", *_TESTED)
    if os.environ.get(_SUBREAPER, "").lower() in ("1", "true"):
        log.warning(
            "%s is set: when a worker ends, Ray kills the agent that carries its snapshots to storage, too. What is in "
            "memory stays there for the next start, and nothing brings it to storage before. Unset it for 'ray start'",
            _SUBREAPER,
        )


def warn_of_objects(saved: Metrics, ranks: int) -> None:
    """Warns if this node's snapshots, of ``ranks`` ranks such as this one, may take what Ray's object store is to get.

    Ray takes pages of its store as objects come: one that finds none ends Ray's process on this node by SIGBUS.
    """
    try:
        if os.stat(memory_base()).st_dev != os.stat(_SHARED).st_dev:
            return
        info = os.statvfs(_SHARED)
    except OSError:
        return
    snapshot = saved.bytes_saved // max(saved.saves, 1) * ranks
    shortage = describe_shortage(snapshot, _object_store(), info.f_blocks * info.f_frsize)
    if shortage is not None:
        log.warning("%s", shortage)


def describe_shortage(snapshot: int, objects: int, room: int) -> str | None:
    """Describes why a node's snapshots of ``snapshot`` bytes don't fit beside ``objects`` bytes; None if they do."""
    if not 0 < objects <= room or _SNAPSHOTS * snapshot + objects <= room:  # a store that is too large lies elsewhere
        return None
    sizes = (f"{nbytes / 1e9:.1f} GB" for nbytes in (_SNAPSHOTS * snapshot, objects, room))
    return (
        "snapshots of this node take up to {}, and Ray's object store {}, of the {} of {}: start Ray with a smaller "
        "--object-store-memory, or set REKINDLE_MEMORY to another file system"
    ).format(*sizes, _SHARED)


def _object_store() -> int:
    """Returns the bytes that Ray's object store may take on this node; 0 if Ray doesn't say."""
    ray = importlib.import_module("ray")
    try:
        here = ray.get_runtime_context().get_node_id()
        found = [node["Resources"].get("object_store_memory", 0) for node in ray.nodes() if node["NodeID"] == here]
    except Exception:
        log.debug("Ray does not tell of its object store", exc_info=True)
        return 0
    return int(found[0]) if found else 0
