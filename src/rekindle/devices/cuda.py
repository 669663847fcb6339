"""Drives CUDA devices, and those of ROCm, whose builds of torch have the same interface."""

from __future__ import annotations

import ctypes
import threading
from contextlib import AbstractContextManager
from functools import cache
from typing import Any

import torch

from rekindle.common.numa import node_of_pci
from rekindle.devices.accelerator import Accelerator
from rekindle.devices.backend import Stream, TimedEvent

__all__ = ["Cuda"]

_PORTABLE = 1
"""cudaHostRegisterPortable: page-locked for every device of this process."""
_RELAXED = 2
"""CU_STREAM_CAPTURE_MODE_RELAXED: what this thread asks of a device breaks no other thread's capture."""

_thread = threading.local()


class Cuda(Accelerator):
    """CUDA devices of this process."""

    def __init__(self) -> None:
        super().__init__("cuda")

    def enter(self, device: torch.device) -> None:
        torch.cuda.set_device(device)
        if not getattr(_thread, "relaxed", False):
            _thread.relaxed = True
            _relax_capture()

    def current_stream(self, device: torch.device) -> Stream:
        return torch.cuda.current_stream(device)

    def new_stream(self, device: torch.device) -> Stream:
        return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def record_timed_event(self, device: torch.device) -> TimedEvent:
        event: TimedEvent = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self.current_stream(device).record_event(event)
        return event

    def on(self, stream: Stream) -> AbstractContextManager[object]:
        return torch.cuda.stream(stream)  # type: ignore[arg-type]

    def synchronize(self, device: torch.device) -> None:
        torch.cuda.synchronize(device)

    def numa_node(self, device: torch.device) -> int | None:
        properties: Any = torch.cuda.get_device_properties(device)
        if not hasattr(properties, "pci_domain_id"):  # an older torch
            return None
        place = properties.pci_domain_id, properties.pci_bus_id, properties.pci_device_id
        return node_of_pci("{:04x}:{:02x}:{:02x}.0".format(*place))

    def register(self, address: int, nbytes: int) -> bool:
        result = int(_runtime().cudaHostRegister(address, nbytes, _PORTABLE))
        if result:
            raise OSError(f"CUDA error {result}")
        return True

    def unregister(self, address: int) -> None:
        _runtime().cudaHostUnregister(address)


def _runtime() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


@cache
def _driver() -> Any:
    """Returns the function that exchanges a thread's capture mode; None if the driver has none."""
    hip = getattr(torch.version, "hip", None)
    library, name = ("libamdhip64.so", "hip") if hip else ("libcuda.so.1", "cu")
    try:
        return getattr(ctypes.CDLL(library), f"{name}ThreadExchangeStreamCaptureMode")
    except (OSError, AttributeError):
        return None


def _relax_capture() -> None:
    exchange = _driver()
    if exchange is not None:
        exchange(ctypes.byref(ctypes.c_int(_RELAXED)))
