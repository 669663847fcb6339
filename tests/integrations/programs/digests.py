"""Hashes what training has made, so that two runs can be compared bit for bit."""

from __future__ import annotations

import hashlib

import torch

__all__ = ["digest"]


def digest(*values: object) -> str:
    """Returns a hash of all bytes of tensors, and of all other values, in dictionaries and lists."""
    found = hashlib.sha256()

    def walk(value):
        if isinstance(value, torch.Tensor):
            value = value.to_local() if hasattr(value, "to_local") else value  # this rank's shard
            found.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
        elif isinstance(value, dict):
            for key, item in sorted(value.items(), key=lambda item: str(item[0])):
                found.update(str(key).encode())
                walk(item)
        elif isinstance(value, (list, tuple)):
            for item in value:
                walk(item)
        else:
            found.update(repr(value).encode())

    walk(values)
    return found.hexdigest()
