"""Frees devices that can't be read after a fault, where the user has given no ``on_stop``."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection

import torch

from rekindle.faults import nccl
from rekindle.memory.fault import Fault

__all__ = ["stop_hook"]


def stop_hook(devices: Collection[torch.device]) -> Callable[[Fault], object] | None:
    """Returns what stops the work of ``devices``; None if that can't be done. For a thread of its own: it may hang."""
    torch_npu = sys.modules.get("torch_npu")
    npus = [device for device in devices if device.type == "npu"]
    if torch_npu is not None and npus:
        return lambda fault: _restart(torch_npu.npu, npus)
    can_abort = devices and nccl.uses_nccl() and nccl.can_abort()
    return (lambda fault: nccl.abort_communicators()) if can_abort else None


def _restart(npu: object, devices: Collection[torch.device]) -> None:
    """Drops what the devices have not done yet, and lets them take work again."""
    for device in devices:
        npu.stop_device(device.index)  # type: ignore[attr-defined]
        npu.restart_device(device.index)  # type: ignore[attr-defined]
