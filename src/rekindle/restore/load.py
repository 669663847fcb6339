"""Loads filled tensors and values into the live objects."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from rekindle.errors import StateMismatchError, UsageError
from rekindle.format.receipt import Receipt
from rekindle.restore.match import Match
from rekindle.restore.saved import Node
from rekindle.state.codec import has_pickle
from rekindle.state.content import StateContent, with_extra_state
from rekindle.state.flat import is_flat
from rekindle.state.placed import PlacedState
from rekindle.state.rng import RngState
from rekindle.state.traits import with_traits
from rekindle.state.tree import assemble, entries, paths_in
from rekindle.state.types import class_names_in, classes_of
from rekindle.state.zero import number_parameters

__all__ = ["build", "check_values", "load"]


def check_values(receipt: Receipt, state: Mapping[str, Any], *, allow_pickle: bool) -> None:
    """Raises UsageError for values whose loading runs or imports code, unless ``allow_pickle`` says that it may.

    These are pickles, and values of classes that the live state has none of.
    """
    if allow_pickle:
        return
    if has_pickle(receipt.values):
        raise UsageError(
            f"the checkpoint of step {receipt.stamp.step} holds pickled values; loading those runs code: "
            "restore(allow_pickle=True) allows it"
        )
    if next(class_names_in(receipt.values), None) is not None:
        known = _classes(state, StateContent(dict(state)))
        for path, number in paths_in(receipt.structure):
            for name in class_names_in(receipt.values[number]):
                if name not in known:
                    raise UsageError(
                        f"{path}: is of the class {name.replace(':', '.')}, and loading imports none: let the live "
                        "state have a value of it before restore(), or restore(allow_pickle=True) imports it"
                    )


def _classes(state: Mapping[str, Any], contents: StateContent) -> dict[str, type]:
    """Maps names to the classes of values that the live state has, for those that loading needs."""
    return classes_of(contents.of(entry) for entry in state.values())


def build(state: Mapping[str, Any], match: Match, *, allow_pickle: bool) -> dict[str, Any]:
    """Builds the argument of each entry's ``load_state_dict()``. Changes nothing live."""
    loading = _Loading(match, allow_pickle=allow_pickle)
    wanted = [name for name in state if match.chosen(name) and match.saved.entry(name) is not None]
    return {name: loading.tree(name, state[name]) for name in wanted}


def load(state: Mapping[str, Any], match: Match, trees: Mapping[str, Any]) -> None:
    """Hands the filled targets of ``match`` and all values, as ``trees``, to the live objects.

    Each entry's ``load_state_dict()`` is called, so that hooks and overridden methods work as ever. It is given live
    tensors where those have been filled in place: torch sees that there is nothing left to copy. Random generators come
    last, so nothing that runs while loading draws from them.
    """
    for name in sorted(trees, key=lambda name: isinstance(state[name], RngState)):
        entry, tree = state[name], trees[name]
        try:
            if is_flat(entry):
                _put(entry, match.contents.of(entry), tree)
            elif isinstance(entry, torch.nn.Module) and match.parts is not None:
                entry.load_state_dict(tree, strict=False)
            else:
                entry.load_state_dict(tree)
        except Exception as error:
            raise StateMismatchError(f"{name}: load_state_dict() refused the checkpoint: {error}") from error
        if isinstance(entry, torch.optim.Optimizer):
            _keep_dtypes(entry, tree)


def _put(module: torch.nn.Module, live: Mapping[str, Any], tree: Mapping[str, Any]) -> None:
    """Copies into ``module`` in place of a ``load_state_dict()`` that would gather parameters, which are filled
    already."""
    with torch.no_grad():
        for key, leaf in live.items():
            if isinstance(leaf, torch.Tensor) and key in tree and tree[key] is not leaf:
                leaf.copy_(tree[key])
    for key, part in with_extra_state(module):
        if key in tree:
            part.set_extra_state(tree[key])


class _Loading:
    """Builds what each entry's ``load_state_dict()`` is to be given."""

    def __init__(self, match: Match, *, allow_pickle: bool) -> None:
        self._match, self._allow_pickle = match, allow_pickle
        needed = any(next(class_names_in(receipt.values), None) is not None for receipt in match.saved.receipts)
        self._classes = _classes(match.state, match.contents) if needed else {}
        self._again: dict[tuple[str, str], torch.Tensor] = {}
        """By entry and name: a tensor outside of modules, with the autograd traits that it had."""

    def tree(self, name: str, entry: Any) -> Any:
        """Builds what one entry is given."""
        saved = self._match.saved.entry(name)
        assert saved is not None
        if isinstance(entry, torch.nn.Module):
            return self._module(name, entry)
        if isinstance(entry, PlacedState):
            return self._children(name, entry)
        if name in self._match.kept:
            return self._optimizer(name, entry, saved)
        return self._build(name, saved)

    def _build(self, entry: str, node: Node) -> Any:
        tensor = partial(self._tensor, entry)
        return assemble(node.body, node.receipt.values, tensor, allow_pickle=self._allow_pickle, classes=self._classes)

    def _tensor(self, entry: str, name: str) -> torch.Tensor:
        """Returns a filled tensor; outside of modules the same one each time, with the autograd traits that it had."""
        found = self._match.tensor(entry, name)
        chunk = self._match.saved.chunk(name)
        if chunk is None or isinstance(self._match.state[entry], torch.nn.Module):
            return found
        return self._again.setdefault((entry, name), with_traits(found, chunk))

    def _module(self, name: str, module: torch.nn.Module) -> Any:
        """Builds a module's state under its live keys, of what the checkpoint has and the live module can take."""
        tree = self._children(name, module)
        if not is_flat(module):
            # Versions of the modules' own formats; torch keeps them in an attribute, and we require the same ones.
            live = module.state_dict(keep_vars=True)
            setattr(tree, "_metadata", getattr(live, "_metadata", None))  # noqa: B010
        return tree

    def _children(self, name: str, entry: Any) -> OrderedDict[str, Any]:
        """Builds what is not filled in place, under its live keys."""
        tree: OrderedDict[str, Any] = OrderedDict()
        for key, canonical in self._match.contents.keys(entry).items():
            node = self._match.saved.child(name, canonical)
            if node is not None and self._match.has(name, node):
                tree[key] = self._build(name, node)
        return tree

    def _optimizer(self, name: str, entry: Any, saved: Node) -> dict[str, Any]:
        """Builds an optimizer's state with the live numbers of its parameters and the saved options of their groups."""
        numbers = {id(p): number for number, p in number_parameters(entry.param_groups).items()}
        state = {
            number: self._build(name, kept)
            if isinstance(kept, Node)
            else {key: self._build(name, value) if isinstance(value, Node) else value for key, value in kept.items()}
            for number, kept in self._match.kept[name].items()
        }
        _untie(state)
        names = self._match.names[name]
        groups = []
        for number, group in enumerate(entry.param_groups):
            own = [key for parameter in group["params"] for key in names[id(parameter)]]
            node = self._match.saved.group_of(name, own[0]) if own else self._match.saved.group(name, number)
            options = {key: child for key, child in entries(node.body).items() if key != "params"} if node else {}
            built = {key: self._build(name, Node(child, node.receipt)) for key, child in options.items() if node}
            groups.append({**({} if node else group), **built, "params": [numbers[id(p)] for p in group["params"]]})
        rest = {key: child for key, child in entries(saved.body).items() if key not in ("state", "param_groups")}
        more = {key: self._build(name, Node(child, saved.receipt)) for key, child in rest.items()}
        return {**more, "state": state, "param_groups": groups}


def _untie(state: Mapping[Any, Any]) -> None:
    """Gives each parameter tensors of its own: flattened ones had a counter together, which would now count for
    each."""
    seen: set[int] = set()
    for kept in state.values():
        for key, value in kept.items() if isinstance(kept, dict) else ():
            if isinstance(value, torch.Tensor):
                kept[key] = value.clone() if id(value) in seen else value
                seen.add(id(kept[key]))


def _keep_dtypes(optimizer: torch.optim.Optimizer, tree: Mapping[str, Any]) -> None:
    """Undoes a cast: torch gives optimizer state the parameter's dtype, which loses bits of float32 state of
    bfloat16."""
    if "state" not in tree or "param_groups" not in tree:
        return
    for live, saved in zip(optimizer.param_groups, tree["param_groups"], strict=True):
        for parameter, number in zip(live["params"], saved["params"], strict=True):
            if number in tree["state"]:
                optimizer.state[parameter] = _uncast(optimizer.state[parameter], tree["state"][number])


def _uncast(live: Any, saved: Any) -> Any:
    """Returns ``live``, with each tensor of another dtype than the saved one replaced by that, on the live one's
    device."""
    if isinstance(live, torch.Tensor) and isinstance(saved, torch.Tensor):
        return live if live.dtype == saved.dtype else saved.to(live.device)
    if isinstance(live, dict):
        return {key: _uncast(value, saved.get(key)) for key, value in live.items()}
    if type(live) in (list, tuple):
        return type(live)(_uncast(value, other) for value, other in zip(live, saved, strict=True))
    return live
