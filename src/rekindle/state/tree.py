"""Flattens nested state into tensors, values and a structure, and assembles it again."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from rekindle.errors import FormatError, UnsupportedValueError
from rekindle.state.codec import decode, encode, is_plain
from rekindle.state.parts import Leaf, is_leaf

__all__ = ["FlatState", "assemble", "describe", "entries", "flatten", "paths_in"]

_DICTS: dict[type, str] = {dict: "$dict", OrderedDict: "$ordered", Counter: "$counter"}
_DEEPEST = 100
"""Most levels of nesting: loading is recursive and must not run out of stack."""

_LISTS: dict[type, str] = {list: "$list", tuple: "$tuple"}


@dataclass
class FlatState:
    """Holds the leaves of a state in the order of the walk. States with equal ``signature`` have equal structures."""

    signature: list[Any] = field(default_factory=list)
    tensors: list[Leaf] = field(default_factory=list)
    values: list[Any] = field(default_factory=list)


def flatten(node: Any, out: FlatState) -> None:
    """Walks ``node`` and appends its leaves to ``out``. Every save calls it, so it does nothing else."""
    kind = type(node)
    children: Any
    if kind in _DICTS:
        out.signature += (kind, tuple(node))
        children = node.values()
    elif kind in _LISTS:
        out.signature += (kind, len(node))
        children = node
    else:
        children = (node,)
    for child in children:
        if is_leaf(child):
            out.signature.append(True)
            out.tensors.append(child)
        elif type(child) in _DICTS or type(child) in _LISTS:
            flatten(child, out)
        else:
            out.signature.append(False)
            out.values.append(child)


@dataclass
class TensorLeaf:
    """Describes a tensor in the structure. The caller completes ``node``, its place there, with its stored name."""

    name: str
    path: str
    node: dict[str, str]
    entry: Any
    """Key in the outermost dictionary."""


@dataclass
class Description:
    """Holds the structure as JSON and its leaves in the order of the walk."""

    structure: Any = None
    leaves: list[TensorLeaf] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    """Path of each value, for messages."""


def describe(node: Any) -> Description:
    """Returns the structure, names and paths, which ``flatten`` leaves out: needed only when the signature is new.

    Raises UnsupportedValueError for a state that is nested too deeply, or has a key that can't be saved.
    """
    out = Description()
    out.structure = _describe(node, "", "", out)
    return out


def _describe(node: Any, name: str, path: str, out: Description, depth: int = 0, entry: Any = None) -> Any:
    kind = type(node)
    if depth > _DEEPEST:
        raise UnsupportedValueError(f"{path[:80]}...: nested more than {_DEEPEST} deep")
    if is_leaf(node):
        leaf = TensorLeaf(_escaped(name), path, {}, entry)
        out.leaves.append(leaf)
        return leaf.node
    if kind in _LISTS:
        items = [_describe(item, f"{name}.{i}", f"{path}[{i}]", out, depth + 1, entry) for i, item in enumerate(node)]
        return items if kind is list else {_LISTS[kind]: items}
    if kind in _DICTS:
        children = []
        for key, value in node.items():
            below = f"{name}.{key}" if name else str(key), path_of(path, key)
            children.append((key, _describe(value, *below, out, depth + 1, entry if depth else key)))
        if kind is dict and all(type(key) is str and not key.startswith("$") and encode(key) is key for key in node):
            return dict(children)
        try:
            return {_DICTS[kind]: [[_key(key), child] for key, child in children]}
        except UnsupportedValueError as error:
            raise UnsupportedValueError(f"{path}: a key of the dictionary: {error}") from None
    out.paths.append(path)
    return {"$value": len(out.paths) - 1}


def _key(key: Any) -> Any:
    encoded = encode(key)
    if not is_plain(encoded):
        raise UnsupportedValueError(
            f"{key!r} is of a class that loading doesn't import: use its value or name as the key"
        )
    return encoded


def _escaped(name: str) -> str:
    """Returns ``name`` with lone surrogates escaped: in JSON two adjacent ones become another character."""
    return name if name.isascii() else name.encode("utf-8", "backslashreplace").decode()


def paths_in(node: Any, path: str = "") -> Iterator[tuple[str, int]]:
    """Yields path and index of each value of a structure."""
    if isinstance(node, dict) and "$value" in node:
        yield path, node["$value"]
        return
    items = node.get("$tuple") if isinstance(node, dict) else node
    for number, item in enumerate(items) if isinstance(items, list) else ():
        yield from paths_in(item, f"{path}[{number}]")
    for key, child in entries(node).items():
        yield from paths_in(child, path_of(path, key))


def entries(node: Any) -> dict[Any, Any]:
    """Maps each key of a dictionary's structure to the child's structure; empty for any other structure.

    Raises FormatError for a key that makes no sense.
    """
    if not isinstance(node, dict):
        return {}
    tag: str = next(iter(node), "")
    if not tag.startswith("$"):
        return node
    if tag not in _DICTS.values():
        return {}
    try:
        return {decode(key): child for key, child in node[tag]}
    except TypeError as error:
        raise FormatError(f"structure is not readable: a key of a dictionary: {error}") from error


def path_of(path: str, key: Any) -> str:
    """Returns ``path`` extended by a dictionary's key, for messages."""
    if not path:
        return str(key)
    return f"{path}.{key}" if isinstance(key, str) else f"{path}[{key!r}]"


def assemble(
    node: Any,
    values: list[Any],
    tensor: Callable[[str], torch.Tensor],
    *,
    allow_pickle: bool,
    classes: Mapping[str, type] | None = None,
) -> Any:
    """Returns the state that ``node``, a structure, describes.

    ``values`` are still encoded, ``tensor`` gives a tensor by name, ``classes`` is as for ``decode``. Raises
    FormatError for a malformed structure or value, UsageError for a pickle that is not allowed.
    """

    def build(node: Any) -> Any:
        return assemble(node, values, tensor, allow_pickle=allow_pickle, classes=classes)

    if isinstance(node, list):
        return [build(item) for item in node]
    if not isinstance(node, dict):
        raise FormatError(f"structure is not readable: {node!r:.80}")
    tag: str = next(iter(node), "")
    body: Any = node.get(tag)
    if not tag.startswith("$"):
        return {key: build(value) for key, value in node.items()}
    if tag == "$tensor":
        return tensor(body)
    if tag == "$value":
        return decode(values[body], allow_pickle=allow_pickle, classes=classes)
    if tag == "$tuple":
        return tuple(build(item) for item in body)
    for kind, name in _DICTS.items():
        if tag == name:
            return kind({key: build(value) for key, value in entries(node).items()})
    raise FormatError(f"unknown structure {tag!r}")
