"""Tells an orchestrator of a fault, by the callbacks that it has registered with the controller of this process."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from typing import Any

from rekindle.provide.mindio_ttp.dump import Result

__all__ = ["ACTIONS", "PROCESS_ERROR", "register", "report_fault", "report_result"]

log = logging.getLogger("rekindle")

ACTIONS = ("report_fault_ranks", "report_stop_complete", "report_strategies", "report_result")
PROCESS_ERROR = 1
"""Kind of a fault in the original's numbers: of a process. Others are of a device's memory, 0, and its links, 2."""
_OK, _EXIT_ONLY = 0, 499
"""The original's codes for a result: all is well; nothing is left to do but to end."""

_registered: dict[str, Callable[..., Any]] = {}


def register(action: str, func: Callable[..., Any]) -> int:
    """Keeps a callback. Returns 0, or 1 for an action that isn't known or a callback that can't be called."""
    if action not in ACTIONS or not callable(func):
        log.error("callback %r for action %r is not registered: actions are %s", func, action, ", ".join(ACTIONS))
        return 1
    _registered[action] = func
    return 0


def report_fault(faults: dict[int, int]) -> None:
    """Tells of the ranks that have failed, and that a dump is the answer."""
    _call("report_fault_ranks", faults, dict.fromkeys(faults, ""))
    _call("report_stop_complete", _OK, "training has stopped", faults)
    _call("report_strategies", faults, ["dump"])


def report_result(faults: dict[int, int], result: Result) -> None:
    """Tells what came of the dump."""
    words = result.error or f"step {result.step} is dumped"
    _call("report_result", _EXIT_ONLY if result.error else _OK, words, faults, "dump")


def _call(action: str, *arguments: Any) -> None:
    """Calls what is registered, with as many of the arguments as it takes: callers of older versions take fewer."""
    func = _registered.get(action)
    if func is None:
        return
    try:
        func(*arguments[: _most(func, len(arguments))])
    except Exception:
        log.exception("the callback of %s failed: the dump goes on", action)


def _most(func: Callable[..., Any], given: int) -> int:
    """Returns how many arguments a callable takes by their places, at most ``given``."""
    try:
        parameters = inspect.signature(func).parameters.values()
    except (TypeError, ValueError):
        return given
    if any(one.kind is one.VAR_POSITIONAL for one in parameters):
        return given
    return min(given, sum(one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD) for one in parameters))
