"""Holds the callables that a user or a framework gives to ``guard()``."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rekindle.memory.fault import Fault

__all__ = ["Hooks"]

log = logging.getLogger("rekindle")


@dataclass(frozen=True)
class Hooks:
    """Callables for backends and frameworks that need to do something of their own. What they raise is logged."""

    on_stop: Callable[[Fault], object] | None = None
    """First thing after a fault: free threads that are stuck in an operator."""
    on_clean: Callable[[int], object] | None = None
    """Before the state of a step is read: let the device take work again, if ``on_stop`` kept it from that."""
    on_gasp: Callable[[int], object] | None = None
    """After the state of a step was secured: save something more."""
    on_exit: Callable[[Fault], object] | None = None
    """Last thing before the process ends."""

    def call(self, name: str, argument: Any) -> None:
        """Call the hook of this name, if there is one. Doesn't raise."""
        hook = getattr(self, name)
        if hook is not None:
            try:
                hook(argument)
            except BaseException:  # SystemExit, too, would end the thread that is to secure the state
                log.exception("%s failed: securing the state goes on", name)
