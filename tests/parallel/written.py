"""What a checkpoint's files hold, read with nothing but JSON and safetensors."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

__all__ = ["Written", "read"]


@dataclass
class Written:
    """Of one checkpoint: every tensor as a whole, and how many bytes are written of it."""

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    own: dict[str, dict[int, torch.Tensor]] = field(default_factory=lambda: defaultdict(dict))
    """Of which each rank has its own, by name and rank."""
    nbytes: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    """Bytes written by all ranks, of those that are not a rank's own."""
    covered: dict[str, torch.Tensor] = field(default_factory=dict)
    """How often each element is there."""
    receipts: list[dict[str, Any]] = field(default_factory=list)


def read(directory: Path) -> Written:
    """All shards of the checkpoint in ``directory``. Raises AssertionError where two ranks differ in what both hold."""
    found = Written()
    for path in sorted(directory.glob("shard-*.json")):
        receipt = json.loads(path.read_bytes())
        found.receipts.append(receipt)
        count: dict[str, int] = defaultdict(int)
        for chunk in receipt["tensors"]:
            count[chunk["name"]] += 1
        at: dict[str, int] = defaultdict(int)
        with safe_open(path.with_suffix(".safetensors"), "pt") as shard:
            for chunk in receipt["tensors"]:
                name = chunk["name"]
                key = name if count[name] == 1 else f"{name}#{at[name]}"
                at[name] += 1
                _put(found, chunk, shard.get_tensor(key), receipt["stamp"]["rank"])
    return found


def _put(found: Written, chunk: dict[str, Any], data: torch.Tensor, rank: int) -> None:
    name = chunk["name"]
    if chunk.get("own"):
        found.own[name][rank] = data
        return
    if name not in found.tensors:
        found.tensors[name] = torch.zeros(chunk["global_shape"], dtype=data.dtype)
        found.covered[name] = torch.zeros(chunk["global_shape"], dtype=torch.uint8)
    box = tuple(slice(at, at + size) for at, size in zip(chunk["offsets"], chunk["sizes"], strict=True))
    before = found.tensors[name][box][found.covered[name][box] > 0]
    assert torch.equal(before, data[found.covered[name][box] > 0]), f"{name}: ranks have other bytes of the same box"
    found.tensors[name][box] = data
    found.covered[name][box] += 1
    found.nbytes[name] += data.nbytes
