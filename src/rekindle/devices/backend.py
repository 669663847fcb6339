"""Defines the contract of a kind of device: all that the other rooms ask of CUDA and its like."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

__all__ = ["Backend", "QueueEvent", "Stream", "TimedEvent"]


class QueueEvent(Protocol):
    """Point in a stream, as torch's events are."""

    def query(self) -> bool:
        """Returns True once the device has come to it. Raises RuntimeError when the device has failed."""
        ...


class TimedEvent(QueueEvent, Protocol):
    """Point in a stream of which the device notes when it comes to it."""

    def elapsed_time(self, end: Any) -> float:
        """Returns the milliseconds from here to ``end``, both reached. Raises RuntimeError if they can't be told."""
        ...


class Stream(Protocol):
    """Queue of a device, as torch's streams are. The device does in order what is queued on one stream."""

    def record_event(self, event: Any = None) -> QueueEvent:
        """Queues and returns an event: a new one, or ``event``, which then stands for this point."""
        ...

    def wait_event(self, event: Any) -> object:
        """Makes the stream, not the host, wait for an event of another one."""
        ...

    def synchronize(self) -> object:
        """Makes the host wait for all that is queued."""
        ...


class Backend(ABC):
    """One kind of device that works off queues, behind the host. Methods may be called from any thread.

    A thread calls ``enter`` before anything else here: what a thread does without it concerns device 0.
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind
        """Type of its ``torch.device``."""

    @abstractmethod
    def in_use(self) -> bool:
        """Returns True if this process has opened a device of this kind. Opens none."""

    @abstractmethod
    def available(self) -> bool:
        """Returns True if the machine has a device of this kind."""

    @abstractmethod
    def enter(self, device: torch.device) -> None:
        """Makes ``device`` the one that the calling thread works on, and its questions no end of a capture."""

    @abstractmethod
    def current_device(self) -> torch.device:
        """Returns the device that the calling thread works on."""

    def numa_node(self, device: torch.device) -> int | None:
        """Returns the node of the machine's memory that the device is nearest to; None if that is not known."""
        return None

    # -- queues -------------------------------------------------------------------------------------------------

    @abstractmethod
    def current_stream(self, device: torch.device) -> Stream:
        """Returns the stream on which the calling thread's work is queued."""

    @abstractmethod
    def new_stream(self, device: torch.device) -> Stream:
        """Returns a stream beside those that training uses."""

    @abstractmethod
    def record_timed_event(self, device: torch.device) -> TimedEvent:
        """Queues an event on the calling thread's stream. Raises RuntimeError if this kind of device tells no times."""

    @abstractmethod
    def on(self, stream: Stream) -> AbstractContextManager[object]:
        """Wraps calls whose work is to be queued on ``stream``."""

    @abstractmethod
    def copy(self, to: Sequence[torch.Tensor], source: Sequence[torch.Tensor]) -> None:
        """Queues copies on the current stream, in either direction.

        Where the host side is not page-locked the caller waits for the copies and, with CUDA, so does every other
        thread that queues work: see ``rekindle.devices.bounce``.
        """

    @abstractmethod
    def gather(self, to: torch.Tensor, parts: Sequence[torch.Tensor]) -> None:
        """Queues, on the current stream, copies of ``parts`` to ``to``, one behind the other: flat tensors of bytes."""

    @abstractmethod
    def add_up(self, to: Sequence[torch.Tensor], parts: Sequence[torch.Tensor]) -> None:
        """Queues, on the current stream, a sum of all bytes of each of ``parts``, by words and modulo 2**64.

        Each of ``to`` is one int64 of the device.
        """

    @abstractmethod
    def keep(self, source: torch.Tensor, stream: Stream) -> None:
        """Keeps freed memory of ``source`` from others until the device has done what ``stream`` is given now."""

    @abstractmethod
    def synchronize(self, device: torch.device) -> None:
        """Makes the host wait for everything that is queued on the device."""

    @abstractmethod
    def capturing(self) -> bool:
        """Returns True if the calling thread's stream is being captured in a graph. Opens no device."""

    @abstractmethod
    def allocate(self, device: torch.device, nbytes: int) -> torch.Tensor:
        """Returns new memory of the device, zeroed, as a tensor of bytes."""

    # -- host memory --------------------------------------------------------------------------------------------

    @abstractmethod
    def pinned(self, nbytes: int) -> torch.Tensor:
        """Returns new host memory as a tensor of bytes: page-locked, if that can be had."""

    def register(self, address: int, nbytes: int) -> bool:
        """Page-locks host memory, so that copies run at the speed of the bus, beside the host.

        False if this kind of device can't. Raises OSError when it fails. The calling thread may then hold an error
        that its next call on the device raises.
        """
        return False

    def unregister(self, address: int) -> None:
        """Ends what ``register`` did. No copy may be under way."""
        raise NotImplementedError

    # -- random generators --------------------------------------------------------------------------------------

    @abstractmethod
    def rng_states(self) -> list[torch.Tensor]:
        """Returns the state of each device's generator, in the order of the devices."""

    @abstractmethod
    def set_rng_states(self, states: Sequence[torch.Tensor]) -> None:
        """Sets the generators of as many devices as there are."""
