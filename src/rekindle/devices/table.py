"""Lists the kinds of devices, and tells which device a tensor is on."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from operator import attrgetter
from typing import Generic, TypeVar

import torch

from rekindle.devices.accelerator import Accelerator
from rekindle.devices.backend import Backend
from rekindle.devices.cuda import Cuda

__all__ = [
    "Entrance",
    "PerDevice",
    "all_backends",
    "backend_of",
    "capturing",
    "current_devices",
    "device_of",
    "enter",
    "has_queues",
    "is_host",
    "on_host",
    "require_backend",
    "used",
]

T = TypeVar("T")

_backends: dict[str, Backend] = {"cuda": Cuda()}
"""Maps the types of devices to their backends. That of torch's common interface is added when it is met."""

_device: Callable[[torch.Tensor], torch.device] = attrgetter("device")
"""Reads a tensor's device. A name of its own only for tests, whose device keeps its tensors in the host's memory."""


def device_of(tensor: torch.Tensor) -> torch.device:
    """Returns the device whose queue ``tensor`` is written by."""
    return _device(tensor)


def is_host(device: torch.device) -> bool:
    """Returns True for the host, whose processor reads and writes the memory itself."""
    return device.type == "cpu"


def on_host(tensor: torch.Tensor) -> bool:
    """Returns True if the processor reads and writes the tensor's memory."""
    return is_host(device_of(tensor))


def has_queues(device: torch.device) -> bool:
    """Returns True if the device works off queues, behind the host, and there is a backend that drives it."""
    return backend_of(device) is not None


def backend_of(device: torch.device) -> Backend | None:
    """Returns the backend of a device; None for the host, and for devices whose copies the host has to wait for."""
    found = _backends.get(device.type)
    if found is None and device.type == _common():
        found = _backends[device.type] = Accelerator(device.type)
    return found


def require_backend(device: torch.device) -> Backend:
    """Returns the backend of a device that is known to have one."""
    found = backend_of(device)
    if found is None:
        raise TypeError(f"device {device} has no queues")
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
    found = None
    with suppress(RuntimeError):  # what torch 2.6 raises where there is none
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


class Entrance:
    """Enters devices in any thread but the one that made this object: that one trains, and has chosen its own."""

    def __init__(self) -> None:
        self._trainer = threading.get_ident()

    def enter(self, devices: Iterable[torch.device]) -> None:
        """Makes ``devices`` those that the calling thread works on, unless it is the one that trains."""
        if threading.get_ident() != self._trainer:
            enter(devices)


def used(tensors: Iterable[torch.Tensor]) -> set[torch.device]:
    """Returns the devices of ``tensors`` that work off queues, behind the host."""
    return {device for device in map(device_of, tensors) if has_queues(device)}


class PerDevice(Generic[T]):
    """Holds one object for each device, made when it is first asked for. Thread-safe; a forked child begins anew."""

    def __init__(self, make: Callable[[torch.device], T]) -> None:
        self._make = make
        self._made: dict[tuple[int, torch.device], T] = {}
        self._making = threading.Lock()

    def of(self, device: torch.device) -> T:
        """Returns the object of ``device``."""
        key = os.getpid(), device
        with self._making:
            if key not in self._made:
                self._made[key] = self._make(device)
            return self._made[key]
