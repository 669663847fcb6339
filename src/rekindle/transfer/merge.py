"""Merges the receipts of all ranks into one state. Pure: reads no files.

Ranks save different things: stages of a pipeline have other layers, sharded optimizers other parameters. Keys whose
tensors only some ranks have are united. A value that is no tensor can't be put together from parts: the lowest rank's
is taken.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from rekindle.errors import CorruptError
from rekindle.format.boxes import Box
from rekindle.format.receipt import Receipt
from rekindle.state.codec import encode
from rekindle.state.tree import entries

__all__ = ["Merged", "Part", "Whole", "find_tensors", "merge", "extract_part"]


class Part(NamedTuple):
    """A stored box of a tensor: chunk number ``chunk`` of receipt number ``receipt``."""

    box: Box
    receipt: int
    chunk: int


@dataclass
class Whole:
    """A tensor of the whole job, and its stored boxes. They may overlap, and need not cover it."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    own: bool
    """True if each rank has a tensor of its own under this name. The parts are then the lowest rank's."""
    order: tuple[int, ...] = ()
    """Its dimensions in their order in memory, the outermost first; empty for row-major."""
    parts: list[Part] = field(default_factory=list)

    @property
    def box(self) -> Box:
        """The box that covers all of it."""
        return Box((0,) * len(self.shape), self.shape)


@dataclass
class Merged:
    """The state of all ranks, as the receipt of a single rank would give it."""

    structure: Any
    values: list[Any] = field(default_factory=list)
    """Values as typed JSON."""
    tensors: dict[str, Whole] = field(default_factory=dict)
    """All stored tensors by name. ``structure`` may name one that isn't stored."""


def merge(receipts: Sequence[Receipt]) -> Merged:
    """Merges what the ranks of one checkpoint have saved. ``receipts`` are in the order of ranks.

    Modules: all keys. Optimizers: the state of all parameters, and groups in which each parameter keeps its options.
    Everything else is taken from the lowest rank, except for keys of other ranks that lead to tensors.

    Raises CorruptError when ranks disagree on the shape or dtype of a tensor that they share.
    """
    values: list[Any] = []
    found: dict[Any, list[_Tree]] = {}
    for receipt in receipts:
        for name, node in entries(receipt.structure).items():
            found.setdefault(name, []).append(_Tree(node, receipt.values))
    structure = _mapping("", {name: _entry(trees, values) for name, trees in found.items()})
    return Merged(structure, values, _tensors(receipts))


def _tensors(receipts: Sequence[Receipt]) -> dict[str, Whole]:
    tensors: dict[str, Whole] = {}
    for number, receipt in enumerate(receipts):
        for index, chunk in enumerate(receipt.layout.chunks):
            first = Whole(chunk.name, chunk.dtype, chunk.global_shape, chunk.own, chunk.order)
            whole = tensors.setdefault(chunk.name, first)
            if (whole.own or chunk.own) and whole.parts and whole.parts[0].receipt != number:
                continue
            if (whole.dtype, whole.shape) != (chunk.dtype, chunk.global_shape):
                raise CorruptError(
                    f"tensor {chunk.name!r} is {chunk.dtype}{list(chunk.global_shape)} on rank {receipt.stamp.rank}, "
                    f"and {whole.dtype}{list(whole.shape)} on a lower one"
                )
            whole.parts.append(Part(chunk.box, number, index))
    return tensors


def find_tensors(node: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """Yields (path, name) of every tensor in a structure. The path is made of keys and numbers with dots between."""
    if isinstance(node, dict) and "$tensor" in node:
        yield path, node["$tensor"]
        return
    items = _items(node)
    for key, child in enumerate(items) if items is not None else entries(node).items():
        yield from find_tensors(child, f"{path}.{key}" if path else str(key))


def extract_part(structure: Any, values: list[Any], names: Mapping[str, str]) -> tuple[Any, list[Any]]:
    """Returns a part of a structure by itself: with no values but its own, and with new names for its tensors."""
    own: list[Any] = []
    return _renamed(_copy(_Tree(structure, values), own), names), own


def _renamed(node: Any, names: Mapping[str, str]) -> Any:
    if isinstance(node, list):
        return [_renamed(item, names) for item in node]
    if not isinstance(node, dict):
        return node
    if "$tensor" in node:
        return {"$tensor": names[node["$tensor"]]}
    return {key: _renamed(child, names) for key, child in node.items()}


# -- one place in the state ------------------------------------------------------------------------------------------


class _Tree(NamedTuple):
    """A rank's structure at one place, and all of that rank's values."""

    node: Any
    values: list[Any]


def _entry(trees: list[_Tree], out: list[Any]) -> Any:
    """Merges one entry of the state of all ranks that have it. Its values are added to ``out``."""
    fields = entries(trees[0].node)
    if not ("state" in fields and isinstance(fields.get("param_groups"), list)):
        return _unite(trees, out)
    there = [(entries(tree.node), tree.values) for tree in trees]
    of = {key: [_Tree(node[key], values) for node, values in there if key in node] for key in fields}
    return _mapping(_tag(trees[0].node), {key: _OPTIMIZER.get(key, _unite)(found, out) for key, found in of.items()})


def _unite(trees: list[_Tree], out: list[Any], *, every: bool = False) -> Any:
    """Returns the lowest rank's structure, with the keys of other ranks that lead to tensors.

    In a mapping that has a tensor all keys are taken, for a module's extra state; with ``every`` they are in any case.
    """
    tag = _tag(trees[0].node)
    if tag is None:
        return _copy(trees[0], out)
    children: dict[Any, list[_Tree]] = {}
    for node, values in trees:
        for key, child in entries(node).items() if _tag(node) is not None else ():
            children.setdefault(key, []).append(_Tree(child, values))
    first = entries(trees[0].node)
    every = every or any(isinstance(t.node, dict) and "$tensor" in t.node for found in children.values() for t in found)

    def leads_to_tensor(found: list[_Tree]) -> bool:
        return any(any(find_tensors(tree.node)) for tree in found)

    kept = {key: found for key, found in children.items() if key in first or every or leads_to_tensor(found)}
    return _mapping(tag, {key: _unite(found, out) for key, found in kept.items()})


def _unite_all(trees: list[_Tree], out: list[Any]) -> Any:
    """Unites the state that an optimizer keeps: that of a parameter may be nothing but values."""
    return _unite(trees, out, every=True)


@dataclass
class _Group:
    """A group of an optimizer's parameters."""

    tree: _Tree
    options: str
    params: list[_Tree] | None
    """The parameters' names or numbers; None where the group has none."""


def _groups(trees: list[_Tree], out: list[Any]) -> Any:
    """Returns the lowest rank's groups. A parameter that they lack joins the group that has the same options."""
    merged: list[_Group] = []
    seen: set[str] = set()
    for rank, tree in enumerate(trees):
        for index, node in enumerate(tree.node if isinstance(tree.node, list) else ()):
            fields = {key: _Tree(child, tree.values) for key, child in entries(node).items()}
            items = _items(fields["params"].node) if "params" in fields else None
            new = None if items is None else [t for t in (_Tree(i, tree.values) for i in items) if _text(t) not in seen]
            if rank and not new:
                continue
            seen.update(map(_text, new or ()))
            options = json.dumps({str(key): _text(t) for key, t in fields.items() if key != "params"}, sort_keys=True)
            # Try the group at the same place first: several groups may have the same options.
            homes = [group for group in (*merged[index : index + 1], *merged) if group.options == options]
            if rank and new and homes and homes[0].params is not None:
                homes[0].params += new
            else:
                merged.append(_Group(_Tree(node, tree.values), options, new))
    return [_group(group, out) for group in merged]


def _group(group: _Group, out: list[Any]) -> Any:
    node, values = group.tree
    children = {
        key: [_copy(name, out) for name in group.params]
        if key == "params" and group.params is not None
        else _copy(_Tree(child, values), out)
        for key, child in entries(node).items()
    }
    return _mapping(_tag(node) or "", children)


_OPTIMIZER = {"state": _unite_all, "param_groups": _groups}


# -- structures ------------------------------------------------------------------------------------------------------


def _tag(node: Any) -> str | None:
    """Returns the kind of mapping that a node is: "" for an object, else its tag; None for no mapping."""
    tag: str = next(iter(node), "") if isinstance(node, dict) else "$"
    return tag if tag in ("$dict", "$ordered", "$counter") else None if tag.startswith("$") else ""


def _items(node: Any) -> list[Any] | None:
    """Returns the items of a list or tuple; None for anything else."""
    items: Any = node.get("$tuple") if isinstance(node, dict) else node
    return items if isinstance(items, list) else None


def _mapping(tag: str | None, children: dict[Any, Any]) -> Any:
    """Returns the structure of a mapping, as rekindle.state.tree would write it."""
    plain = all(type(key) is str and not key.startswith("$") and encode(key) is key for key in children)
    if not tag and plain:
        return children
    return {tag or "$dict": [[encode(key), child] for key, child in children.items()]}


def _copy(tree: _Tree, out: list[Any]) -> Any:
    """Copies a structure and adds its values to ``out``."""
    node, values = tree
    if isinstance(node, dict) and "$value" in node:
        out.append(values[node["$value"]])
        return {"$value": len(out) - 1}
    items = _items(node)
    if items is not None:
        copied = [_copy(_Tree(item, values), out) for item in items]
        return copied if isinstance(node, list) else {"$tuple": copied}
    tag = _tag(node)
    if tag is None:
        return node
    return _mapping(tag, {key: _copy(_Tree(child, values), out) for key, child in entries(node).items()})


def _text(tree: _Tree) -> str:
    """Returns a text that is equal for equal structures with equal values."""
    values: list[Any] = []
    return json.dumps([_copy(tree, values), values])
