"""Drives devices through torch's common interface of accelerators, which XPU, MPS and others share."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any

import torch

from rekindle.devices.backend import Backend, Stream, TimedEvent

__all__ = ["Accelerator", "as_integers"]


class Accelerator(Backend):
    """Devices of one type that have ``torch.Stream`` and ``torch.Event``."""

    @property
    def _module(self) -> Any:
        """Module of torch for this kind of device, such as ``torch.xpu``."""
        return torch.get_device_module(self.kind)

    def in_use(self) -> bool:
        initialized = getattr(self._module, "is_initialized", None)
        return bool(initialized() if initialized is not None else self._module.is_available())

    def available(self) -> bool:
        return bool(self._module.is_available())

    def enter(self, device: torch.device) -> None:
        if hasattr(self._module, "set_device"):
            self._module.set_device(device)

    def current_device(self) -> torch.device:
        current = getattr(self._module, "current_device", None)
        return torch.device(self.kind, current() if current is not None else 0)

    def current_stream(self, device: torch.device) -> Stream:
        found: Stream = torch.accelerator.current_stream(device)
        return found

    def new_stream(self, device: torch.device) -> Stream:
        return torch.Stream(device)

    def record_timed_event(self, device: torch.device) -> TimedEvent:
        event: TimedEvent = torch.Event(device, enable_timing=True)
        self.current_stream(device).record_event(event)
        return event

    def on(self, stream: Stream) -> AbstractContextManager[object]:
        return self._on(stream)

    @contextmanager
    def _on(self, stream: Any) -> Iterator[None]:
        # ``with stream`` is newer than torch 2.6. It keeps on the stream what to go back to, which threads share.
        before, device = torch.accelerator.current_stream(stream.device), self.current_device()
        torch.accelerator.set_stream(stream)  # makes its device the current one, too
        try:
            yield
        finally:
            torch.accelerator.set_stream(before)
            self.enter(device)

    def copy(self, to: Sequence[torch.Tensor], source: Sequence[torch.Tensor]) -> None:
        with torch.no_grad():
            torch._foreach_copy_(list(to), list(source), non_blocking=True)

    def gather(self, to: torch.Tensor, parts: Sequence[torch.Tensor]) -> None:
        torch.cat(list(parts), out=to)

    def add_up(self, to: Sequence[torch.Tensor], parts: Sequence[torch.Tensor]) -> None:
        for place, part in zip(to, parts, strict=True):
            torch.sum(as_integers(part), 0, dtype=torch.int64, out=place)

    def keep(self, source: torch.Tensor, stream: Stream) -> None:
        with suppress(NotImplementedError):  # MPS, whose allocator counts for itself what its queue still uses
            source.record_stream(stream)  # type: ignore[arg-type]

    def synchronize(self, device: torch.device) -> None:
        torch.accelerator.synchronize(device)

    def capturing(self) -> bool:
        capturing = getattr(self._module, "is_current_stream_capturing", None)
        return bool(self.in_use() and capturing is not None and capturing())

    def allocate(self, device: torch.device, nbytes: int) -> torch.Tensor:
        return torch.zeros(nbytes, dtype=torch.uint8, device=device)

    def pinned(self, nbytes: int) -> torch.Tensor:
        try:
            return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)
        except RuntimeError:  # none left, or none of this kind
            return torch.empty(nbytes, dtype=torch.uint8, device="cpu")

    def rng_states(self) -> list[torch.Tensor]:
        read = getattr(self._module, "get_rng_state_all", None)
        return list(read()) if read is not None else [self._module.get_rng_state()]

    def set_rng_states(self, states: Sequence[torch.Tensor]) -> None:
        for index, state in enumerate(states[: self._module.device_count()]):
            if hasattr(self._module, "get_rng_state_all"):
                self._module.set_rng_state(state, index)
            else:
                self._module.set_rng_state(state)


def as_integers(part: torch.Tensor) -> torch.Tensor:
    """Returns the elements, in order, as the widest integers that fit: sums of narrower ones take memory on the way."""
    data = part.resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)
    for dtype in (torch.int64, torch.int32, torch.int16):
        if not (data.nbytes % dtype.itemsize or data.storage_offset() % dtype.itemsize):
            return data.view(dtype)
    return data
