"""torch's flight recorder, read: which collective each rank came to last, over gloo and NCCL alike."""

from __future__ import annotations

import json
from typing import Any

import torch._C

__all__ = ["last_collectives", "recording"]


def recording() -> bytes:
    """All that is recorded, as torch's own ``torchfrtrace`` reads it; empty when nothing is."""
    return bytes(_call("_dump_fr_trace")) if _entries() else b""


def last_collectives() -> list[str]:
    """A line for each process group that has been used: what was asked of it last, and the how manieth that was."""
    last = {entry["process_group"][1] or entry["process_group"][0]: entry for entry in _entries()}
    return [
        f"{group}: {entry['profiling_name']} number {entry['collective_seq_id']}, shapes {entry['input_sizes']}"
        for group, entry in last.items()
    ]


def _entries() -> list[dict[str, Any]]:
    text = _call("_dump_fr_trace_json")
    found: list[dict[str, Any]] = json.loads(text).get("entries", []) if text else []
    return found


def _call(name: str) -> Any:
    # A torch that was built without distributed has neither.
    return getattr(getattr(torch._C, "_distributed_c10d", None), name, bytes)()
