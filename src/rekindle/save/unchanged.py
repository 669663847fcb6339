"""Compares a state with the one that a plan was made of: in place, on the path of every save.

``state_dict()`` builds dictionaries, and flattening them builds lists. For modules and optimizers that keep torch's own
``state_dict()`` as it is, the same is learned from the dictionaries that they keep, without an object for each tensor.
Such objects would also set off Python's collector, which then walks through all of the job's.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch.nn import Module
from torch.optim import Optimizer

from rekindle.state.content import StateContent
from rekindle.state.flat import is_flat
from rekindle.state.parts import FlatPart, Leaf, local_tensor
from rekindle.state.tree import FlatState, flatten

__all__ = ["StateWatch"]


class StateWatch:
    """Detects changes in the structure of ``state``. ``leaves`` are all its tensors in order of flattening."""

    def __init__(self, state: Mapping[str, Any], contents: StateContent, leaves: list[Leaf]) -> None:
        self._entries = [_watch(entry, contents) for entry in state.values()]
        self._leaves = leaves
        held = list(map(local_tensor, leaves))
        self._plain = held if all(map(operator.is_, held, leaves)) else []
        """All tensors, if none has its memory in another: else each has to be asked for that, 1 ms a thousand."""
        self._before = self._places()

    def values(self) -> list[Any] | None:
        """Returns all values that are not tensors, in order of flattening; None when anything else has changed."""
        found: list[Any] = []
        if not all(entry.same(found) for entry in self._entries):
            return None
        return found if self._places() == self._before else None

    def _places(self) -> list[tuple[int, torch.Size, tuple[int, ...], torch.dtype]]:
        """Returns address, shape, strides and dtype of each tensor."""
        tensors = self._plain or map(local_tensor, self._leaves)
        return [(t.data_ptr(), t.shape, t.stride(), t.dtype) for t in tensors]


class _Any:
    """Anything with a ``state_dict()``."""

    def __init__(self, entry: Any, contents: StateContent) -> None:
        self._entry, self._contents = entry, contents
        self._flat = self._look()
        self._wanted = list(map(_requires_grad, self._flat.tensors))

    def _look(self) -> FlatState:
        flat = FlatState()
        flatten(self._contents.of(self._entry), flat)
        return flat

    def same(self, values: list[Any]) -> bool:
        """Returns True if structure and tensors are those of the start. Appends the values."""
        flat = self._look()
        values += flat.values
        if flat.signature != self._flat.signature:
            return False
        if list(map(_requires_grad, flat.tensors)) != self._wanted:
            return False
        return _identical(list(map(_identity, flat.tensors)), list(map(_identity, self._flat.tensors)))


class _Module:
    """A module whose ``state_dict()`` is torch's own, hooks and extra state included: there are none."""

    def __init__(self, module: Module) -> None:
        modules = list(module.modules())
        self._hidden = [(m, m._non_persistent_buffers_set.copy()) for m in modules]
        self._hooks = [hooks for m in modules for hooks in (m._state_dict_hooks, m._state_dict_pre_hooks)]
        self._kept = [d for m in modules for d in (m._parameters, m._buffers, m._modules)]
        self._before = _contents(self._kept)
        self._alive = [list(d.values()) for d in self._kept]

    @staticmethod
    def suits(module: Module) -> bool:
        return all(
            not isinstance(m, torch.jit.ScriptModule)  # which keeps its parts where Python doesn't see them
            and type(m).state_dict is Module.state_dict
            and type(m)._save_to_state_dict is Module._save_to_state_dict
            and type(m).get_extra_state is Module.get_extra_state
            and "state_dict" not in vars(m)
            and not (m._state_dict_hooks or m._state_dict_pre_hooks)
            for m in module.modules()
        ) and not is_flat(module)

    def same(self, values: list[Any]) -> bool:
        return (
            _contents(self._kept) == self._before
            and all(m._non_persistent_buffers_set == hidden for m, hidden in self._hidden)
            and not any(self._hooks)
        )


class _Optimizer:
    """An optimizer whose ``state_dict()`` is torch's own, and whose state is nothing but tensors for each parameter."""

    def __init__(self, optimizer: Optimizer, contents: StateContent) -> None:
        self._optimizer = optimizer
        self._groups = [self._group(group) for group in optimizer.param_groups]
        self._params = [list(group["params"]) for group in optimizer.param_groups]
        self._owners = list(map(id, optimizer.state))
        self._before = _contents(optimizer.state.values())
        self._alive = list(optimizer.state), [list(kept.values()) for kept in optimizer.state.values()]
        names = contents.names(optimizer)
        self._names = [[name for parameter in group for name in names[id(parameter)]] for group in self._params]

    @staticmethod
    def suits(optimizer: Optimizer) -> bool:
        every = [id(p) for group in optimizer.param_groups for p in group["params"]]
        params = set(every)
        return (
            len(every) == len(params)  # torch has a numbering of its own for a parameter that is there twice
            and type(optimizer).state_dict is Optimizer.state_dict
            and "state_dict" not in vars(optimizer)
            and not (optimizer._optimizer_state_dict_pre_hooks or optimizer._optimizer_state_dict_post_hooks)
            and all(id(p) in params and type(kept) is dict for p, kept in optimizer.state.items())
            and all(isinstance(v, torch.Tensor) for kept in optimizer.state.values() for v in kept.values())
        )

    @staticmethod
    def _group(group: dict[str, Any]) -> FlatState:
        flat = FlatState()
        flatten({key: value for key, value in group.items() if key != "params"}, flat)
        return flat

    def same(self, values: list[Any]) -> bool:
        optimizer = self._optimizer
        groups = optimizer.param_groups
        if (
            len(groups) != len(self._groups)
            or list(map(id, optimizer.state)) != self._owners
            or _contents(optimizer.state.values()) != self._before
            or optimizer._optimizer_state_dict_pre_hooks
            or optimizer._optimizer_state_dict_post_hooks
        ):
            return False
        for group, params, names, before in zip(groups, self._params, self._names, self._groups, strict=True):
            now = self._group(group)
            if not (
                now.signature == before.signature
                and _identical(now.tensors, before.tensors)
                and _identical(group["params"], params)
            ):
                return False
            values += now.values
            values += names
        return True


def _contents(kept: Collection[Mapping[str, Any]]) -> tuple[list[str], list[int]]:
    """Returns names and identities in dictionaries whose contents are kept alive, so that no identity comes back."""
    return [name for d in kept for name in d], [id(value) for d in kept for value in d.values()]


def _identical(now: list[Any], before: list[Any]) -> bool:
    """Returns True if both have the same objects, in order."""
    return len(now) == len(before) and all(map(operator.is_, now, before))


def _identity(leaf: Leaf) -> torch.Tensor:
    return leaf.counter if isinstance(leaf, FlatPart) else leaf


def _requires_grad(leaf: Leaf) -> bool:
    return _identity(leaf).requires_grad


def _watch(entry: Any, contents: StateContent) -> _Any | _Module | _Optimizer:
    if isinstance(entry, Module) and _Module.suits(entry):
        return _Module(entry)
    if isinstance(entry, Optimizer) and _Optimizer.suits(entry):
        return _Optimizer(entry, contents)
    return _Any(entry, contents)
