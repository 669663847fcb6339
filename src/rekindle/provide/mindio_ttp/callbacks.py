"""Holds the callbacks of one process, and the arguments that they get back."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Any

from rekindle.errors import UsageError

__all__ = ["DAMAGE", "Callbacks", "callbacks", "say_once"]

log = logging.getLogger("rekindle")

DAMAGE = ("RS_UCE", "RS_UCE_CORRUPTED")
"""States in which a rank's device memory has lost what it held."""
_TEXTS_OF_DAMAGE = ("UCE ERROR", "HBM MULTI BIT ECC")
"""Words of torch_npu's exceptions that stand for such a state."""

_said: set[str] = set()


def say_once(key: str, text: str, *values: object) -> None:
    """Logs a warning, once in a process, on rank 0 only: all ranks make the same calls."""
    if key not in _said and os.environ.get("RANK", "0") == "0":
        log.warning(text, *values)
    _said.add(key)


class Callbacks:
    """The callables that were registered, each with its context."""

    def __init__(self) -> None:
        self._registered: dict[str, tuple[Callable[..., Any], Any]] = {}
        self.args: Any = None
        """Handed back to callbacks: what ``tft_set_step_args`` was given, else the decorated function's arguments."""
        self.patterns: list[tuple[str, str, Callable[[str], str]]] = []
        """Words of an exception, the state that they stand for, and the callable that is told of it."""

    def register(self, name: str, func: Callable[..., Any], ctx: Any = None) -> None:
        """Keeps a callback. Raises TypeError for what is none."""
        if not callable(func):
            raise TypeError(f"the callback {name} is {func!r}: func must be a callable")
        self._registered[name] = func, ctx

    def has(self, name: str) -> bool:
        """Returns True if a callback of that name was registered."""
        return name in self._registered

    def call(self, name: str, *arguments: Any, ctx: bool = True) -> Any:
        """Calls a callback, with its context behind the arguments. Returns its answer; None if there is none."""
        if name not in self._registered:
            return None
        func, context = self._registered[name]
        return func(*arguments, context) if ctx else func(*arguments)

    def expect(self, pattern: str, state: str, handle: Callable[[str], str]) -> None:
        """Keeps what is to be called when an exception has ``pattern`` in its text. Raises UsageError or TypeError."""
        if not isinstance(pattern, str) or not pattern or not isinstance(state, str):
            raise UsageError(f"pattern {pattern!r} and state {state!r} of an exception: must be texts")
        if not callable(handle):
            raise TypeError(f"the handler of {pattern!r} is {handle!r}: must be a callable")
        self.patterns.append((pattern, state, handle))

    def describe(self, error: BaseException) -> str:
        """Returns what the handlers of an exception's text say of it. A handler that fails says nothing."""
        text, words = str(error), []
        for pattern, state, handle in self.patterns:
            if pattern in text:
                try:
                    words.append(f"{state}: {handle(text)}")
                except Exception as failure:
                    log.warning("the handler of %r failed: %s: %s", pattern, type(failure).__name__, failure)
        return "; ".join(words)

    def tells_damage(self, error: BaseException) -> bool:
        """Returns True if an exception's text stands for damaged device memory."""
        registered = [pattern for pattern, state, _ in self.patterns if state in DAMAGE]
        return any(words in str(error) for words in (*_TEXTS_OF_DAMAGE, *registered))


callbacks = Callbacks()
"""Those of this process. One set, as the original has."""
