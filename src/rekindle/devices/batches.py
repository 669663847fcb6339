"""Cuts copies from a device into batches, of which few wait in its queue: training's own copies stand behind them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

import torch

from rekindle.devices.events import Event, wait_for_copy
from rekindle.devices.streams import copy_now

__all__ = ["AHEAD", "DEVICE_BATCH", "Pair", "batched", "copy_in_batches"]

DEVICE_BATCH = 32 << 20
"""Bytes after which a batch is full: few enough that training's own small copies don't wait long behind it, 0.7 ms with
a bus of 50 GB/s, and enough to keep the bus busy."""
AHEAD = 4
"""Batches that are queued before the oldest of them has been copied.

A bus does one copy after the other, whatever streams they are on: training's own, as for ``loss.item()``, waits for all
that is queued before it. Four batches keep the bus busy from one look at the device to the next.
"""
Pair = tuple[torch.Tensor, torch.Tensor]
"""A place, and what is to be copied into it."""


def copy_in_batches(
    device: torch.device,
    to: Sequence[torch.Tensor],
    source: Sequence[torch.Tensor],
) -> None:
    """Copies from ``device`` on the calling thread's stream, into page-locked memory. Returns when that is done.

    Raises RekindleError when the device is stuck.
    """
    queued: deque[Event] = deque()
    for pairs in batched(to, source, DEVICE_BATCH):
        if len(queued) == AHEAD:
            wait_for_copy(queued.popleft())
        event = copy_now(device, [place for place, _ in pairs], [part for _, part in pairs])
        if event is not None:
            queued.append(event)
    if queued:
        wait_for_copy(queued.pop())


def batched(
    to: Sequence[torch.Tensor], source: Sequence[torch.Tensor], most: int, align: int = 1
) -> Iterator[list[Pair]]:
    """Yields places and sources of ``most`` bytes at a time, each rounded up to ``align``. Larger tensors are cut."""
    batch: list[Pair] = []
    used = 0
    for whole, other in zip(to, source, strict=True):
        for pair in _cut(whole, other, most):
            taken = -(-pair[1].nbytes // align) * align
            if batch and used + taken > most:
                yield batch
                batch, used = [], 0
            batch.append(pair)
            used += taken
    if batch:
        yield batch


def _cut(to: torch.Tensor, source: torch.Tensor, most: int) -> Iterator[Pair]:
    if source.nbytes <= most:
        yield to, source
        return
    rows = most // source[0].nbytes
    if not rows:
        for one, other in zip(to, source, strict=True):
            yield from _cut(one, other, most)
        return
    for at in range(0, len(source), rows):
        yield to[at : at + rows], source[at : at + rows]
