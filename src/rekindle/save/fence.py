"""Holds an update back until the copy of what it changes is complete: by hooks on optimizers, and ``updating()``.

Parameters that an optimizer owns, and its state, last from ``ckpt.step(n)`` until that optimizer's next ``step()``. A
hook before that step waits for the copy. Nothing else is known to last: what no fenced optimizer owns is not offered.

That holds while updates are announced. Replayed graphs and kernels of others call no hook, so a step is relied on only
if the update that made it was announced, and nothing that was not has ever been found.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from rekindle.devices.backend import Stream
from rekindle.devices.table import capturing, require_backend
from rekindle.state.placed import PlacedState
from rekindle.state.zero import ZeroState

__all__ = ["Fence", "some_of"]

log = logging.getLogger("rekindle")

_FULLGRAPH = "a compiled optimizer step without graph breaks needs 'with ckpt.updating():' around its calls"


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
        self._ended = -1, 0
        """The newest step that ``end_step`` was called with, and ``steps`` then."""
        self._announced = self._distrusted = self._inside = False
        self.devices: Collection[torch.device] = ()
        """Devices of the state."""
        self._streams: dict[torch.device, list[Stream]] = {}
        """Streams on which updates were queued since the newest step."""
        self._hooks: dict[int, list[RemovableHandle]] = {}
        optimizers = {id(one): one for one in map(_optimizer, self._owners())}
        for key, optimizer in optimizers.items():
            # torch calls hooks from the step() that Optimizer.__init__ has wrapped, and from no other.
            if isinstance(optimizer, torch.optim.Optimizer) and getattr(type(optimizer).step, "hooked", False):
                self._hooks[key] = [
                    optimizer.register_step_pre_hook(self._untraced(self._before_step)),
                    optimizer.register_step_post_hook(self._untraced(self._after_step)),
                ]
        self._all_hooked = len(self._hooks) == len(optimizers)
        """True if all that updates parameters of the state calls hooks."""

    def _untraced(self, hook: Callable[..., None]) -> Callable[..., None]:
        """Returns the hook as torch's compiler is to meet it: it calls the hook, and doesn't look inside.

        A graph that must be whole can't have such a call. Inside of ``updating()``, which has announced the update, it
        is left out.
        """
        disable: Any = torch.compiler.disable
        with suppress(TypeError):  # torch before 2.8 takes no reason
            disable(_nothing, reason=_FULLGRAPH)
            disable = partial(disable, reason=_FULLGRAPH)
        called = disable(hook)

        def compiled(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
            if not (self._inside and torch.compiler.is_compiling()):
                called(optimizer, args, kwargs)

        return compiled

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

    def _after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        for device in () if capturing() else self.devices:
            stream, known = require_backend(device).current_stream(device), self._streams.setdefault(device, [])
            if stream not in known:
                known.append(stream)

    def catch_up(self) -> None:
        """Have the caller's streams wait, on the devices, for updates that optimizers have queued on others."""
        for device, streams in self._streams.items():
            here = require_backend(device).current_stream(device)
            for stream in streams:
                if stream != here:
                    here.wait_event(stream.record_event())
        self._streams.clear()

    def _captured(self, optimizer: torch.optim.Optimizer) -> None:
        """Stop relying on the hook: a CUDA graph replays the update without calling it."""
        if self._hooks.pop(id(optimizer), None) is not None:
            self._changed, self._all_hooked = True, False
            if not self._by_hand:
                log.warning(
                    "an optimizer's step is being captured in a CUDA graph, whose replay calls no hooks: from now on "
                    "its state is copied inside of ckpt.step(), unless replays are wrapped in 'with ckpt.updating():'"
                )

    @contextmanager
    def by_hand(self) -> Iterator[None]:
        """Wrap an update that ``updating()`` announces: from now on it stands before every one that no hook does."""
        self.updates += 1
        self.steps += 1
        self._changed |= not self._by_hand
        self._by_hand = self._inside = True
        try:
            yield
        finally:
            self._inside = False

    # -- what may be relied on ----------------------------------------------------------------------------------

    def begin(self) -> None:
        """Rely on nothing that was announced so far: the state is one that was restored, or that of the start."""
        self._ended, self._announced = (-1, self.steps), False

    def end_step(self, n: int) -> None:
        """Note that step ``n`` is complete. May be called again for the same step, as by ``save()``."""
        if self._ended != (n, self.steps):
            self._announced = self._ended[1] != self.steps
            self._ended = n, self.steps

    @property
    def announced(self) -> bool:
        """True if the update that made the newest step was announced, so that the next one is expected to be, too."""
        return self._announced and not self._distrusted

    @property
    def announced_whole(self) -> bool:
        """True if that goes for all that updates the state: until the next one it may be read where it lives."""
        return self.announced and (self._all_hooked or self._by_hand)

    @property
    def distrusted(self) -> bool:
        """True once an update was found that nobody had announced."""
        return self._distrusted

    def distrust(self, step: int, names: Collection[str]) -> None:
        """Rely on no announcement any more: ``names`` have changed since ``step``, and nobody had announced that."""
        if not self._distrusted:
            self._distrusted = True
            log.warning(
                "%s: changed after ckpt.step(%d) without an announcement, as by a replayed CUDA graph, .data or a "
                "fused kernel. From now on all is copied inside of ckpt.step(), which is slower, and a fault doesn't "
                "read what a device holds: the job goes back to its newest snapshot. Wrap such updates in 'with "
                "ckpt.updating():', or make the Checkpointer before the graph is captured",
                *(some_of(names), step),
            )

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
        for hook in (hook for hooks in self._hooks.values() for hook in hooks):
            hook.remove()
        self._hooks.clear()


def some_of(names: Collection[str]) -> str:
    """Returns the first three of ``names`` and the number of the others."""
    return ", ".join(sorted(names)[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _nothing() -> None:
    return None


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
