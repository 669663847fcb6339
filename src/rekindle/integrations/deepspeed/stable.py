"""Tells which tensors of a DeepSpeed engine change only in ``engine.step()``, and takes copies of all others."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch

from rekindle.files.contents import Contents, Segment
from rekindle.files.pickled import of_storage

__all__ = ["freeze", "stable_storages"]

_FLAT = ("single_partition_of_fp32_groups", "fp32_partitioned_groups_flat", "fp32_groups_flat_partition")
"""Attributes with a rank's weights in full precision: of ZeRO-1 and 2, of ZeRO-3, of the optimizer for bfloat16."""


def stable_storages(engine: Any) -> set[int]:
    """Returns the addresses of the memory that stays as it is from one update to the next.

    These are weights and the optimizer's state, which is nearly everything. Buffers change in a forward pass, and what
    the user adds may change at any time.
    """
    optimizer = engine.optimizer
    inner = getattr(optimizer, "optimizer", optimizer)
    tensors = list(_tensors(getattr(inner, "state", {}).values()))
    tensors += _tensors(getattr(optimizer, name, ()) for name in _FLAT)
    if not engine.zero_optimization_partition_weights():  # ZeRO-3 gathers weights and lets go of them in between
        tensors += engine.module.parameters()
    return {tensor.untyped_storage().data_ptr() for tensor in tensors} - {0}


def _tensors(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, dict):
            yield from _tensors(value.values())
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


def freeze(contents: Contents, stable: set[int]) -> None:
    """Lets contents be copied later, up to the next update: takes a copy now of each tensor that may change before."""
    contents.segments = [_frozen(segment, stable) for segment in contents.segments]


def _frozen(segment: Segment, stable: set[int]) -> Segment:
    storage = segment.owner
    if not isinstance(storage, torch.UntypedStorage):
        return segment
    if storage.data_ptr() not in stable:
        copy: torch.UntypedStorage = storage.clone()  # type: ignore[no-untyped-call]
        segment = of_storage(copy, segment.start)
    return segment if segment.put is None else _after_queued_work(segment, segment.put, storage.device)


def _after_queued_work(segment: Segment, put: Callable[[memoryview], object], device: torch.device) -> Segment:
    """Lets another thread copy from a device in the caller's stream: after the kernels that write what is copied."""
    module = torch.get_device_module(device)
    stream = module.current_stream(device)

    def put_in_stream(place: memoryview) -> None:
        with module.stream(stream):
            put(place)

    return replace(segment, put=put_in_stream)
