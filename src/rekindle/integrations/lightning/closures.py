"""Lets forward and backward pass run before the update, in which Lightning's automatic optimization has them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

__all__ = ["run_closure_first"]


def run_closure_first(optimizer: Any) -> RemovableHandle | None:
    """Has an optimizer call the closure that ``step()`` is given before other hooks, and take its result later.

    A hook that comes after this one then waits for a copy beside both passes, and a step is not torn by a fault in
    them. Only torch's own optimizers that call a closure once and at their beginning are known to do the same by that;
    others are left alone, and None is returned.
    """
    kind = type(optimizer)
    if not kind.step.__module__.startswith("torch.optim.") or isinstance(optimizer, torch.optim.LBFGS):
        return None
    handle: RemovableHandle = optimizer.register_step_pre_hook(_call_closure)
    return handle


def _call_closure(optimizer: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """Returns the arguments with the result in place of the closure; None if there is no closure."""
    closure = options.get("closure") if len(args) < 2 else args[1]
    if closure is None:
        return None
    with torch.enable_grad():
        result: Callable[[], Any] = _Result(closure())
    if len(args) < 2:
        return args, {**options, "closure": result}
    return (args[0], result, *args[2:]), options


class _Result:
    """Stands for a closure that has been called."""

    def __init__(self, loss: Any) -> None:
        self._loss = loss

    def __call__(self) -> Any:
        return self._loss
