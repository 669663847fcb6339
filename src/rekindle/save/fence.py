"""Holds an update back until the copy of what it changes is complete: by hooks on optimizers, and ``updating()``.

Parameters that an optimizer owns, and its state, last from ``ckpt.step(n)`` until that optimizer's next ``step()``. A
hook before that step waits for the copy. Nothing else is known to last: what no fenced optimizer owns is not offered.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from rekindle.devices.table import capturing
from rekindle.state.placed import PlacedState
from rekindle.state.zero import ZeroState

__all__ = ["Fence"]

log = logging.getLogger("rekindle")


class Fence:
    """Stands before any update of ``state``, in the thread that updates."""

    def __init__(self, state: Mapping[str, Any]) -> None:
        self._state = state
        self._wait: Callable[[], Callable[[], object] | None] = lambda: None
        """Returns the method to call before each update; None if there is none, or its object is gone."""
        self._by_hand = self._changed = False
        self.updates = 0
        """Updates that were announced."""
        self.steps = 0
        """Those of them that may have trained: one with a learning rate of zero only makes an optimizer's state."""
        self._hooks: dict[int, RemovableHandle] = {}
        for optimizer in (_optimizer(owner) for owner in self._owners()):
            # torch calls hooks from the step() that Optimizer.__init__ has wrapped, and from no other.
            if isinstance(optimizer, torch.optim.Optimizer) and getattr(type(optimizer).step, "hooked", False):
                # A compiled step() calls it too.
                hook = torch.compiler.disable(self._before_step)  # type: ignore[no-untyped-call]
                self._hooks[id(optimizer)] = optimizer.register_step_pre_hook(hook)

    def call_before_updates(self, wait: Callable[[], object]) -> None:
        """Have ``wait``, a bound method that is held weakly, called before each update from now on."""
        self._wait = weakref.WeakMethod(wait)

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if capturing():
            self._captured(optimizer)
            return
        self.updates += 1
        self.steps += any(map(_trains, optimizer.param_groups))
        wait = self._wait()
        if wait is not None:
            wait()

    def _captured(self, optimizer: torch.optim.Optimizer) -> None:
        """Stop relying on the hook: a CUDA graph replays the update without calling it."""
        if self._hooks.pop(id(optimizer), None) is not None:
            self._changed = True
            if not self._by_hand:
                log.warning(
                    "an optimizer's step is being captured in a CUDA graph, whose replay calls no hooks: from now on "
                    "its state is copied inside of ckpt.step(), unless replays are wrapped in 'with ckpt.updating():'"
                )

    def by_hand(self) -> None:
        """Note that ``updating()`` is used: from now on it stands before every update that no hook announces."""
        self.updates += 1
        self.steps += 1
        self._changed |= not self._by_hand
        self._by_hand = True

    @property
    def hooked(self) -> bool:
        """True if any optimizer announces its updates by itself."""
        return bool(self._hooks)

    def changed(self) -> bool:
        """Returns True if ``lasting`` may have changed since the last call."""
        changed, self._changed = self._changed, False
        return changed

    def lasting(self) -> set[int]:
        """Returns the ids of the tensors that stay as they are until the next update."""
        owners = self._owners()
        fenced = [entry for entry in owners if self._by_hand or id(_optimizer(entry)) in self._hooks]
        owned = {id(p) for entry in fenced for group in entry.param_groups for p in group["params"]}
        if self._by_hand and not owners:  # updates by somebody whose state is not ours
            owned = {id(p) for module in self._modules() for p in module.parameters() if p.requires_grad}
        return owned | {id(t) for entry in fenced for t in _tensors(getattr(entry, "state", None))}

    def _owners(self) -> list[Any]:
        """Returns the entries that update parameters; in place of a PlacedState, its optimizers."""
        entries = [
            owner
            for entry in self._state.values()
            for owner in (entry.optimizers if isinstance(entry, PlacedState) else [entry])
        ]
        return [entry for entry in entries if isinstance(getattr(entry, "param_groups", None), list)]

    def _modules(self) -> list[torch.nn.Module]:
        return [entry for entry in self._state.values() if isinstance(entry, torch.nn.Module)]

    def close(self) -> None:
        """Leave the optimizers as they were."""
        for hook in self._hooks.values():
            hook.remove()
        self._hooks.clear()


def _optimizer(entry: Any) -> Any:
    return entry.optimizer if isinstance(entry, ZeroState) else entry


def _trains(group: dict[str, Any]) -> bool:
    lr = group.get("lr")
    return isinstance(lr, torch.Tensor) or lr != 0  # a look into a tensor would wait for the GPU


def _tensors(node: Any) -> Iterator[torch.Tensor]:
    if isinstance(node, torch.Tensor):
        yield node
    elif isinstance(node, Mapping):
        for child in node.values():
            yield from _tensors(child)
    elif isinstance(node, (list, tuple)):
        for child in node:
            yield from _tensors(child)
