"""Reads the snapshots that memory holds, past the product: what is in memory is seen in its files, not in counters."""

from __future__ import annotations

import json
from pathlib import Path

__all__ = ["allocated", "snapshots_in_memory", "values"]


def snapshots_in_memory(root: str | Path, memory: str | Path) -> dict[int, Path]:
    """Returns the file of the first rank's snapshot by step, of all that are committed."""
    from rekindle.memory.job_dir import JobDir, memory_base

    job = JobDir.of(root, memory_base(str(memory)))
    return {stamp.step: path.with_suffix(".safetensors") for stamp, path in job.snapshots.shard_ids()}


def allocated(root: str | Path, memory: str | Path) -> list[int]:
    """Returns the bytes that each file for snapshots of the first rank holds."""
    from rekindle.memory.job_dir import JobDir, memory_base

    job = JobDir.of(root, memory_base(str(memory)))
    return [path.stat().st_blocks * 512 for path in job.snapshots.rank_files(0)]


def values(path: Path, prefix: str) -> tuple[float, float]:
    """Returns the least and the greatest float32 of the tensors whose names begin with ``prefix``; of each 97th."""
    import numpy as np

    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        table = json.loads(file.read(length))
    low, high = [], []
    for name, entry in table.items():
        if name.startswith(prefix):
            start, stop = entry["data_offsets"]
            shape = ((stop - start) // 4,)
            data = np.memmap(path, dtype=np.float32, mode="r", offset=8 + length + start, shape=shape)[::97]
            low.append(float(data.min()))
            high.append(float(data.max()))
    if not low:
        raise ValueError(f"{path} has no tensor that begins with {prefix!r}")
    return min(low), max(high)
