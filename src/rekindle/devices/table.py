"""Lists the kinds of devices, and tells which device a tensor is on."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from operator import attrgetter

import torch

from rekindle.devices.accelerator import Accelerator
from rekindle.devices.backend import Backend
from rekindle.devices.cuda import Cuda

__all__ = ["all_backends", "backend_of", "device_of", "on_host", "capturing", "current_devices", "enter", "used"]

_backends: dict[str, Backend] = {"cuda": Cuda()}
"""Maps the types of devices to their backends. That of torch's common interface is added when it is met."""

_device: Callable[[torch.Tensor], torch.device] = attrgetter("device")


def device_of(tensor: torch.Tensor) -> torch.device:
    """Returns the device whose queue ``tensor`` is written by."""
    return _device(tensor)


def on_host(tensor: torch.Tensor) -> bool:
    """Returns True if the processor reads and writes the tensor's memory."""
    return device_of(tensor).type == "cpu"


def backend_of(device: torch.device) -> Backend | None:
    """Returns the backend of a device; None for the host, and for devices whose copies the host has to wait for."""
    found = _backends.get(device.type)
    if found is None and device.type == _common():
        found = _backends[device.type] = Accelerator(device.type)
    return found


def all_backends() -> list[Backend]:
    """Returns the backends of all kinds of devices that this machine may have."""
    common = _common()
    if common:
        backend_of(torch.device(common))
    return list(_backends.values())


def _common() -> str:
    """Returns the type of this process's accelerator, if torch drives it by its common interface; else ""."""
    accelerator = getattr(torch, "accelerator", None)  # torch 2.6
    found = accelerator.current_accelerator() if accelerator is not None else None
    return found.type if found is not None else ""


def capturing() -> bool:
    """Returns True if the calling thread's work is being captured in a graph, to be replayed later."""
    return any(backend.capturing() for backend in all_backends())


def current_devices() -> list[torch.device]:
    """Returns the devices that the calling thread works on, one of each kind that this process uses."""
    return [backend.current_device() for backend in all_backends() if backend.in_use()]


def enter(devices: Iterable[torch.device]) -> None:
    """Makes ``devices`` those that the calling thread works on: else a new thread opens the first one of each kind."""
    for device in devices:
        backend = backend_of(device)
        if backend is not None:
            backend.enter(device)


def used(tensors: Iterable[torch.Tensor]) -> set[torch.device]:
    """Returns the devices of ``tensors`` that work off queues, behind the host."""
    return {device for device in map(device_of, tensors) if backend_of(device) is not None}
