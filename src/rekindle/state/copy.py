"""Bytes from live tensors into a shard, checksummed on the way."""

from __future__ import annotations

import mmap
from concurrent.futures import ThreadPoolExecutor

import torch

from rekindle.failpoints import reach
from rekindle.snapshot.documents import checksum
from rekindle.state.capture import Plan

__all__ = ["ShardWriter", "Views"]

Views = tuple[object, list[torch.Tensor]]
"""A plan's cut, and where each of its units lies in one buffer."""


class ShardWriter:
    """Copies a plan's tensors into buffers. One helper thread hashes what the calling thread has copied."""

    def __init__(self) -> None:
        self._hasher = ThreadPoolExecutor(1, thread_name_prefix="rekindle-hash")

    def write(self, plan: Plan, buffer: mmap.mmap, cache: object, step: int) -> tuple[Views, list[str]]:
        """Fill ``buffer`` with the shard. Returns what to pass as ``cache`` next time, and the checksums.

        The tensors must not change meanwhile. ``buffer`` holds ``plan.layout.file_bytes`` bytes.
        """
        layout = plan.layout
        base = len(layout.header)
        if isinstance(cache, tuple) and cache[0] is plan.cut:
            views: Views = cache
        else:
            buffer[:base] = layout.header
            views = plan.cut, [unit.view(buffer, base) for unit in plan.units]
        data = memoryview(buffer)
        ranges = layout.blocks

        def digest(first: int, last: int) -> list[str]:
            return [checksum(data[base + start : base + stop]) for start, stop in ranges[first:last]]

        pending = []
        with torch.no_grad():
            for number, (first, last, block, end) in enumerate(plan.batches):
                torch._foreach_copy_(views[1][first:last], [unit.source for unit in plan.units[first:last]])
                if number == len(plan.batches) // 2:
                    reach("save.copying", step)
                if number + 1 < len(plan.batches):
                    pending.append(self._hasher.submit(digest, block, end))
        sums = digest(*plan.batches[-1][2:]) if plan.batches else []
        return views, [*(s for future in pending for s in future.result()), *sums]

    def close(self) -> None:
        self._hasher.shutdown()
