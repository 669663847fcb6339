"""Tells an orchestrator of a fault, by the callbacks that it has registered with the controller of this process."""

from __future__ import annotations

import inspect
import logging
import threading
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
_PATIENCE = 2.0
"""Seconds for an orchestrator to take what it is told. The dump waits meanwhile, and then goes on without it."""

_registered: dict[str, Callable[..., Any]] = {}


def register(action: str, func: Callable[..., Any]) -> int:
    """Keeps a callback. Returns 0, or 1 for an action that isn't known or a callback that can't be called."""
    if action not in ACTIONS or not callable(func):
        log.error("callback %r for action %r is not registered: actions are %s", func, action, ", ".join(ACTIONS))
        return 1
    _registered[action] = func
    return 0


def report_fault(faults: dict[int, int]) -> None:
    """Tells of the ranks that have failed, and that a dump is the answer. Returns in a bounded time."""
    _tell(
        ("report_fault_ranks", faults, dict.fromkeys(faults, "")),
        ("report_stop_complete", _OK, "training has stopped", faults),
        ("report_strategies", faults, ["dump"]),
    )


def report_result(faults: dict[int, int], result: Result) -> None:
    """Tells what came of the dump. Returns in a bounded time."""
    words = result.error or f"step {result.step} is dumped"
    _tell(("report_result", _EXIT_ONLY if result.error else _OK, words, faults, "dump"))


def _tell(*messages: tuple[Any, ...]) -> None:
    """Calls what is registered for each message, its action first. One that doesn't return is left behind."""
    left = [(_registered[message[0]], *message) for message in messages if message[0] in _registered]

    def call() -> None:
        while left:
            _call(*left[0])
            del left[0]

    if not left:
        return
    thread = threading.Thread(target=call, name="rekindle-ttp-mindx", daemon=True)
    thread.start()
    thread.join(_PATIENCE)
    for _, action, *_ in left[:1]:
        log.error("the callback of %s has not returned within %.0f s: the dump goes on", action, _PATIENCE)


def _call(func: Callable[..., Any], action: str, *arguments: Any) -> None:
    """Calls ``func`` with as many of the arguments as it takes: callers of older versions take fewer."""
    try:
        func(*arguments[: _most(func, len(arguments))])
    except BaseException:  # such as SystemExit, with which the messages after it would be lost
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
