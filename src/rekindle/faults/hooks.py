"""Holds the callables that a user or a framework gives to ``guard()``, and calls them at a fault, each for a while."""

from __future__ import annotations

import inspect
import logging
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, fields
from typing import Any

import torch

from rekindle.devices.table import enter
from rekindle.errors import UsageError
from rekindle.memory.fault import Fault

__all__ = ["HookCalls", "Hooks"]

log = logging.getLogger("rekindle")

_SHARES = {"on_stop": 0.2, "on_clean": 0.25, "on_gasp": 0.5, "on_exit": 0.9}
"""Part of the time left until the deadline that a hook may take. Those before the state is read leave it the most: of
the 25 s that are the default, they may take 5 s each."""


@dataclass(frozen=True)
class Hooks:
    """Callables for backends and frameworks that need something of their own. Raises UsageError for what is none."""

    on_stop: Callable[[Fault], object] | None = None
    """At once after a fault: free threads that are stuck in an operator. With a device, only if that can't be read."""
    on_clean: Callable[..., object] | None = None
    """Before the state of a step is read: let the device take work again. An answer that counts as false, None
    excepted: the state must not be read."""
    on_gasp: Callable[..., object] | None = None
    """After the state of a step was secured: save something more."""
    on_exit: Callable[[Fault], object] | None = None
    """Last thing before the process ends."""

    def __post_init__(self) -> None:
        for field in fields(self):
            hook = getattr(self, field.name)
            if not (hook is None or callable(hook)):
                raise UsageError(f"{field.name} is {hook!r}: must be a callable or None")


class HookCalls:
    """Calls the hooks at one fault, each in a thread of its own. Methods don't raise: what hooks raise is logged."""

    def __init__(self, hooks: Hooks, fault: Fault, end: float, devices: Collection[torch.device]) -> None:
        """``end``: the deadline, by the monotonic clock. ``devices``: those that a hook's thread is to work on."""
        self._hooks, self._fault, self._end, self._devices = hooks, fault, end, devices

    def stop(self) -> None:
        """Calls ``on_stop``."""
        self._call("on_stop", self._fault)

    def clean(self, step: int) -> bool:
        """Calls ``on_clean``. Returns False if its answer is false, and not None: ``step`` must not be read."""
        return self._call_with_step("on_clean", step) is not False

    def gasp(self, step: int) -> None:
        """Calls ``on_gasp``."""
        self._call_with_step("on_gasp", step)

    def exit(self) -> None:
        """Calls ``on_exit``."""
        self._call("on_exit", self._fault)

    def _call_with_step(self, name: str, step: int) -> object:
        hook = getattr(self._hooks, name)
        named = {"fault": self._fault} if hook is not None and _takes_fault(hook) else {}
        return self._call(name, step, **named)

    def _call(self, name: str, *arguments: Any, **named: Any) -> object:
        """Calls a hook, if there is one, and returns its answer. One that hangs is left behind after its share."""
        hook = getattr(self._hooks, name)
        if hook is None:
            return None
        answers: list[object] = []

        def run() -> None:
            try:
                enter(self._devices)
                answer = hook(*arguments, **named)
                # In this thread, too: to ask a tensor on a device may hang.
                answers.append((answer is None or bool(answer)) if name == "on_clean" else answer)
            except BaseException:  # SystemExit, too, is no reason to leave the state unsecured
                log.exception("%s failed: securing the state goes on", name)

        thread = threading.Thread(target=run, name=f"rekindle-{name}", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # none is to be had, which may be the fault: the deadline bounds the hook
            run()
            return answers[0] if answers else None
        share = _SHARES[name] * max(0.0, self._end - time.monotonic())
        thread.join(share)
        if thread.is_alive():
            log.error(
                "%s has not returned within %.1f s and is left behind: securing the state goes on. A longer "
                "gasp_deadline gives it more",
                *(name, share),
            )
        return answers[0] if answers else None


def _takes_fault(hook: Callable[..., object]) -> bool:
    """Returns True if the callable has a parameter ``fault`` that can be given by name."""
    try:
        parameter = inspect.signature(hook).parameters.get("fault")
    except (TypeError, ValueError):  # some callables written in C have no signature
        return False
    return parameter is not None and parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
