"""Takes Ray's word that a node is to be taken away as a notice for ``ckpt.guard()``.

Ray Train calls the train function in a thread of its worker, where no signal can be taken. Its public
``get_preemption_info()`` is a barrier of all workers, so the worker's own record is read. Written for Ray 2.60.
"""

from __future__ import annotations

import importlib
import logging
import signal
import time
from typing import Any

from rekindle.faults.notices import Notice
from rekindle.integrations.ray.surroundings import is_local, warn_of_cluster

__all__ = ["notices"]

log = logging.getLogger("rekindle")


def notices() -> tuple[Notice, ...]:
    """Returns what tells this worker to go, for ``ckpt.guard(notices=notices())``: Ray drains the node that it is on.

    To be called in the train function. The step under way is then secured, and the worker ends; Ray counts that as a
    preemption, and starts all workers again. Of a version of Ray that keeps no record there are no notices, and a
    warning says so.
    """
    warn_of_cluster()
    if is_local(importlib.import_module("ray.train").get_context()):  # in the main thread
        return (signal.SIGTERM,)
    try:
        context = importlib.import_module("ray.train.v2._internal.execution.context").get_train_context()
        notice = _Preemption(context)
        notice()
    except (ImportError, AttributeError, RuntimeError) as error:
        log.warning("this version of Ray gives no notice of a preemption that can be read here: %s", error)
        return ()
    return (notice,)


class _Preemption:
    """Tells, when called, that Ray drains the node of this worker. Its text follows on "was told to go by"."""

    def __init__(self, context: Any) -> None:
        self._context = context

    def __call__(self) -> bool:
        info = self._context.preemption_context.preemption_info
        return info is not None and self._context.get_world_rank() in info.preempted_ranks

    def __str__(self) -> str:
        deadline = self._context.preemption_context.preemption_info.deadline_ms
        left = "" if deadline is None else f", in {max(0.0, deadline / 1000 - time.time()):.0f} s"
        return f"Ray: its node is to be taken away{left}"
