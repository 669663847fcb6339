"""Lays DCP's plan of a save out as a shard: what to copy where, and how the state was nested."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType

from rekindle.errors import UnsupportedValueError
from rekindle.format.layout import DTYPES, Chunk, Layout
from rekindle.save.plan import CopyPlan, Piece, batches
from rekindle.state.codec import encode

__all__ = ["LeafPath", "copyable", "plan_shard", "wait_for_collective"]

LeafPath = tuple[str | int, ...]
"""Place of a leaf in the nested state dict, as DCP's planners note it: numbers count the elements of a list."""


def plan_shard(plan: SavePlan, planner: SavePlanner) -> tuple[CopyPlan, bytes]:
    """Plans the copies, and encodes the receipt's values: the pickles that DCP has made of everything but tensors.

    Raises UnsupportedValueError for a tensor that the format has no type for.
    """
    pieces: dict[tuple[str, tuple[int, ...]], Piece] = {}
    values: list[Any] = []
    leaves: dict[str, Any] = {}
    for item in plan.items:
        name, data = item.index.fqn, planner.resolve_data(item)
        if item.type == WriteItemType.BYTE_IO:
            leaves[name] = {"$value": len(values)}
            values.append(encode(bytes(data.getbuffer())))  # type: ignore[union-attr]
        else:
            assert isinstance(data, torch.Tensor)
            tensor = wait_for_collective(data.detach())
            chunk = _chunk(item, tensor)
            pieces[name, chunk.offsets] = Piece(chunk, tensor, tensor, late=False, ranks=())
            leaves[name] = {"$tensor": name}
    layout = Layout.build(piece.chunk for piece in pieces.values())
    early, _ = batches(layout, pieces)
    structure = _nest(leaves, _paths(plan, leaves))
    return CopyPlan(layout, structure, early, [], {}, {}), json.dumps(values, separators=(",", ":")).encode()


def wait_for_collective(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the tensor itself, where a collective still works on it."""
    return tensor.wait() if isinstance(tensor, AsyncCollectiveTensor) else tensor


def copyable(tensor: torch.Tensor) -> bool:
    """Returns True if a tensor is nothing but bytes of a type that the format knows."""
    return (
        type(tensor).__torch_dispatch__ is torch.Tensor.__torch_dispatch__
        and tensor.layout is torch.strided
        and str(tensor.dtype).removeprefix("torch.") in DTYPES
        and not (tensor.is_nested or tensor.is_meta or (tensor.numel() and not tensor.data_ptr()))
    )


def _chunk(item: WriteItem, tensor: torch.Tensor) -> Chunk:
    dtype = str(tensor.dtype).removeprefix("torch.")
    if not copyable(tensor):
        raise UnsupportedValueError(
            f"{item.index.fqn}: a {type(tensor).__name__} of layout {tensor.layout}, dtype {dtype}, on {tensor.device} "
            "has no type in the checkpoint format"
        )
    assert item.tensor_data is not None
    box = item.tensor_data.chunk
    if tuple(box.sizes) != tuple(tensor.shape):
        raise UnsupportedValueError(f"{item.index.fqn}: planned as {tuple(box.sizes)}, but is {tuple(tensor.shape)}")
    return Chunk(item.index.fqn, dtype, tuple(item.tensor_data.size), tuple(box.offsets), tuple(box.sizes))


def _paths(plan: SavePlan, names: Mapping[str, Any]) -> dict[str, LeafPath]:
    """Returns the place of each leaf before DCP's planner flattened the state; by itself if that is not known of
    all."""
    known = plan.planner_data if isinstance(plan.planner_data, dict) else {}
    paths = {name: known.get(name) for name in names}
    if all(isinstance(path, tuple) and ".".join(map(str, path)) == name for name, path in paths.items()):
        return {name: tuple(path) for name, path in paths.items() if path}
    return {name: (name,) for name in names}


class _Branch(dict[Any, Any]):
    """A level of the nesting. A leaf may be a plain dictionary."""


def _nest(leaves: Mapping[str, Any], paths: Mapping[str, LeafPath]) -> Any:
    root = _Branch()
    for name, leaf in leaves.items():
        *way, last = paths[name]
        at = root
        for key in way:
            at = at.setdefault(key, _Branch())
        at[last] = leaf
    return _structure(root)


def _structure(branch: _Branch) -> Any:
    """Encodes a branch. A list of which this rank writes some elements becomes a dictionary with numbers for keys."""
    children = [(key, _structure(node) if isinstance(node, _Branch) else node) for key, node in branch.items()]
    if all(isinstance(key, str) and not key.startswith("$") and encode(key) is key for key, _ in children):
        return dict(children)
    return {"$dict": [[encode(key), node] for key, node in children]}
