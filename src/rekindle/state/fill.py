"""Where a shard's tensors go: into the live state's own memory where that fits, else into tensors made for them."""

from __future__ import annotations

import bisect
import ctypes
import mmap
import threading
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from rekindle.snapshot.documents import Receipt
from rekindle.snapshot.layout import BLOCK, Chunk, blocks
from rekindle.state.device import page_lock
from rekindle.state.tree import entries

__all__ = ["Destinations"]


class Destinations:
    """The tensors that a shard is loaded into, by name; a ``Sink`` of its blocks.

    Parameters, buffers and optimizer state are filled where they are, if saved and live tensor agree in shape and
    dtype. All others get new tensors on the host, which stay untouched until they are filled.
    """

    def __init__(self, receipt: Receipt, state: Mapping[str, Any]) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self.live: dict[str, str] = {}
        """Of those that are the live state's own: the entry that they were found in."""
        self._numbers: list[tuple[Chunk, int]] = []
        """Of each block: its chunk, and its first byte within that."""
        chunks = {chunk.name: chunk for chunk in receipt.layout.chunks}
        claimed = _Claims()
        saved = entries(receipt.structure)
        for name, entry in state.items():
            for chunk_name, tensor in _live(entry, saved.get(name)):
                chunk = chunks[chunk_name]
                if chunk_name not in self.tensors and _fits(chunk, tensor) and claimed.add(tensor):
                    self.tensors[chunk_name] = tensor
                    self.live[chunk_name] = name
        self._plain: dict[str, memoryview] = {}
        self._parked: dict[str, _Parked] = {}
        for chunk in receipt.layout.chunks:
            if chunk.name not in self.tensors:
                self.tensors[chunk.name] = torch.empty(chunk.sizes, dtype=getattr(torch, chunk.dtype))
            tensor = self.tensors[chunk.name]
            self._numbers += [(chunk, start - chunk.start) for start, _ in blocks(chunk)]
            if tensor.device.type == "cpu" and tensor.is_contiguous():
                self._plain[chunk.name] = _bytes_of(tensor)
            elif not tensor.is_contiguous():
                self._parked[chunk.name] = _Parked(tensor)
        self._sides = _Sides()

    # -- as a sink --------------------------------------------------------------------------------------------------

    def place(self, block: int) -> memoryview | None:
        chunk, at = self._numbers[block]
        whole = self._plain.get(chunk.name)
        if whole is None and chunk.name in self._parked:
            whole = self._parked[chunk.name].memory()
        return None if whole is None else whole[at : min(at + BLOCK, chunk.nbytes)]

    def take(self, block: int, at: int, data: memoryview) -> None:
        """Into a device's tensor. Other threads read on while this one waits for the copy."""
        chunk, start = self._numbers[block]
        flat = self.tensors[chunk.name].detach().view(-1).view(torch.uint8)
        piece = torch.frombuffer(data, dtype=torch.uint8)
        self._sides.copy(flat[start + at : start + at + len(data)], piece)

    def lock(self, buffer: mmap.mmap) -> object:
        return page_lock(buffer)

    # -- before and after -------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Wait until devices have done what they were told, so that nothing still reads what is now filled."""
        for device in {self.tensors[name].device for name in self.live}:
            if device.type == "cuda":
                torch.cuda.synchronize(device)

    def settle(self) -> None:
        """Put what torch has to bring into order in its place, and tell autograd what has been written."""
        with torch.no_grad():
            for parked in self._parked.values():
                parked.unload()
        for name in self.live:
            if not self.tensors[name].is_inference():
                torch.autograd.graph.increment_version(self.tensors[name])


class _Parked:
    """A tensor that isn't contiguous, and the memory in which its bytes wait until torch puts them into order."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor
        self._lock = threading.Lock()
        self._memory: torch.Tensor | None = None

    def memory(self) -> memoryview:
        with self._lock:
            if self._memory is None:
                self._memory = torch.empty(self._tensor.shape, dtype=self._tensor.dtype)
        return _bytes_of(self._memory)

    def unload(self) -> None:
        if self._memory is not None:
            self._tensor.detach().copy_(self._memory)
            self._memory = None


class _Sides:
    """A stream for each thread and CUDA device, so that copies of several threads overlap."""

    def __init__(self) -> None:
        self._local = threading.local()

    def copy(self, to: torch.Tensor, source: torch.Tensor) -> None:
        with torch.no_grad():
            if to.device.type != "cuda":
                to.copy_(source)
                return
            streams = self._local.__dict__.setdefault("streams", {})
            stream = streams.get(to.device)
            if stream is None:
                stream = streams[to.device] = torch.cuda.Stream(to.device)  # type: ignore[no-untyped-call]
            with torch.cuda.stream(stream):
                to.copy_(source, non_blocking=True)
            stream.synchronize()


class _Claims:
    """Memory that is spoken for: two saved tensors must never be written into the same bytes at a time."""

    def __init__(self) -> None:
        self._ranges: dict[torch.device, list[tuple[int, int]]] = {}

    def add(self, tensor: torch.Tensor) -> bool:
        """False, and nothing claimed, where a part is taken."""
        span = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
        start = tensor.data_ptr()
        stop = start + span * tensor.element_size()
        ranges = self._ranges.setdefault(tensor.device, [])
        at = bisect.bisect(ranges, (start, stop))
        if (at and ranges[at - 1][1] > start) or (at < len(ranges) and ranges[at][0] < stop):
            return False
        ranges.insert(at, (start, stop))
        return True


def _live(entry: Any, node: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Name in the shard and live tensor of everything that the entry has at the place where it was saved from."""
    saved = entries(node)
    if isinstance(entry, torch.nn.Module):
        for key, tensor in entry.state_dict(keep_vars=True).items():
            if isinstance(tensor, torch.Tensor):
                yield from _pairs(saved.get(key), tensor)
    elif isinstance(entry, torch.optim.Optimizer) and "state" in saved:
        yield from _pairs(saved["state"], entry.state_dict().get("state"))


def _pairs(node: Any, live: Any) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(node, dict) and "$tensor" in node:
        if isinstance(live, torch.Tensor):
            yield node["$tensor"], live
    elif isinstance(live, dict):
        for key, child in entries(node).items():
            yield from _pairs(child, live.get(key))
    elif isinstance(live, (list, tuple)):
        children = node if isinstance(node, list) else node.get("$tuple", ()) if isinstance(node, dict) else ()
        for child, item in zip(children, live, strict=False):
            yield from _pairs(child, item)


def _fits(chunk: Chunk, tensor: torch.Tensor) -> bool:
    """Whether the chunk's bytes can be put into the tensor's own memory."""
    return (
        tuple(tensor.shape) == chunk.sizes
        and str(tensor.dtype) == f"torch.{chunk.dtype}"
        and type(tensor).__torch_dispatch__ is torch.Tensor.__torch_dispatch__
        and tensor.layout is torch.strided
        and tensor.numel() > 0
        and not (tensor.is_meta or tensor.is_nested or tensor.is_conj() or tensor.is_neg())
        and tensor.data_ptr() != 0
        and all(stride > 0 or size == 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    )


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous tensor on the host. The caller keeps the tensor."""
    if not tensor.nbytes:
        return memoryview(bytearray())
    return memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")
