"""Clears devices that can't be read after a fault, where the user has given no ``on_stop``."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection

import torch

from rekindle.devices.clearing import Clearing, registered
from rekindle.faults import nccl
from rekindle.memory.fault import Fault

__all__ = ["stop_hook"]

_HOST = torch.device("cpu")


def stop_hook(devices: Collection[torch.device]) -> Callable[[Fault], object] | None:
    """Returns what clears ``devices``, or the host if there are none; None if nothing is known to do it.

    For a thread of its own: it may hang. It raises RuntimeError for a device whose memory is lost.
    """
    pairs = [(device, registered(device.type) or _default(device)) for device in devices or (_HOST,)]
    known = [(device, clearing) for device, clearing in pairs if clearing is not None and clearing != Clearing()]
    return (lambda fault: _clear(known)) if known else None


def _default(device: torch.device) -> Clearing | None:
    """Returns what is known of a type of device: NPUs are stopped and started again, else NCCL is made to give up.

    The host needs nothing: what its threads are stuck in doesn't keep others from its memory.
    """
    torch_npu = sys.modules.get("torch_npu")
    if device.type == "npu" and torch_npu is not None:
        npu = torch_npu.npu
        return Clearing(
            stop=lambda device: npu.stop_device(device.index), restore=lambda device: npu.restart_device(device.index)
        )
    if device.type != "cpu" and nccl.uses_nccl() and nccl.can_abort():
        return Clearing(stop=_abort)
    return None


def _abort(device: torch.device) -> None:
    nccl.abort_communicators()


def _clear(known: list[tuple[torch.device, Clearing]]) -> None:
    aborted = False
    for device, clearing in known:
        if clearing.stop is not None and not (aborted and clearing.stop is _abort):  # once for all devices
            clearing.stop(device)
            aborted |= clearing.stop is _abort
    for device, clearing in known:
        if clearing.clean is not None and clearing.clean(device) is False:
            raise RuntimeError(f"the memory of device {device} is lost, as its clean says: it is not restored")
    for device, clearing in known:
        if clearing.restore is not None:
            clearing.restore(device)
