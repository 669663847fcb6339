"""Takes Ray's word that a node is to be taken away as a notice for ``ckpt.guard()``.

Ray Train calls the train function in a thread of its worker, where no signal can be taken. Its public
``get_preemption_info()`` is a barrier of all workers, so the worker's own record is read. Written for Ray 2.60.
"""

from __future__ import annotations

import importlib
import logging
import signal
import time
from dataclasses import replace
from typing import Any

from rekindle.faults.notices import Notice
from rekindle.integrations.ray.surroundings import is_local, warn_of_cluster
from rekindle.memory.fault import Fault

__all__ = ["leave", "notices"]

log = logging.getLogger("rekindle")

_LONGEST = 60.0
"""Seconds for which a worker waits to be ended. ``guard()`` waits for less: until ``gasp_deadline``."""


def notices() -> tuple[Notice, ...]:
    """Returns what tells this worker to go, for ``ckpt.guard(notices=notices())``: Ray drains the node that it is on.

    To be called in the train function. The step under way is then secured, and the worker ends, to Ray a failure unless
    ``leave`` is given too. Of a version of Ray that keeps no record there are no notices, and a warning says so.
    """
    warn_of_cluster()
    if is_local(importlib.import_module("ray.train").get_context()):  # in the main thread
        return (signal.SIGTERM,)
    try:
        notice = _Preemption(_context())
        notice()
    except (ImportError, AttributeError, RuntimeError) as error:
        log.warning("this version of Ray gives no notice of a preemption that can be read here: %s", error)
        return ()
    return (notice,)


def leave(fault: Fault) -> None:
    """Waits until Ray ends this worker, for ``ckpt.guard(on_exit=leave)``: Ray then counts a preemption, not a failure.

    A worker that ends by itself has failed to Ray, which allows ``max_failures`` of these, by default none. The others
    it ends at the deadline of the preemption. Here that has come as soon as the step is secured. Where no node is to be
    taken away this returns at once.
    """
    if is_local(importlib.import_module("ray.train").get_context()):
        return
    told = _context().preemption_context
    if told.preemption_info is not None:
        told.preemption_info = replace(told.preemption_info, deadline_ms=0)  # past, whatever clock and grace there are
        time.sleep(_LONGEST)


def _context() -> Any:
    """Returns this worker's own record of its training."""
    return importlib.import_module("ray.train.v2._internal.execution.context").get_train_context()


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
