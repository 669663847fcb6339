"""DCP's ``AsyncStager``: a state dict copied into host memory in one pass, which is used again from save to save."""

from __future__ import annotations

import copy
import mmap
import sys
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor, ShardedTensorBase
from torch.distributed._shard.sharded_tensor.shard import Shard
from torch.distributed.checkpoint.staging import AsyncStager
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from rekindle.integrations.dcp.items import copyable, settled
from rekindle.snapshot.layout import Chunk, Layout
from rekindle.state.capture import Plan, batches
from rekindle.state.copy import ShardWriter
from rekindle.state.device import page_lock

__all__ = ["RekindleStager"]

_DICTS = (dict, OrderedDict)
_LINGER, _POLL = 0.05, 0.001
"""Seconds that a save's thread may take to let go of what it has saved, once its future is done. Making memory takes
longer."""


class RekindleStager(AsyncStager):
    """Copies state dicts for ``dcp.async_save``, with all of this rank's cores; training may go on once it returns.

    The memory is that of an earlier copy, if that is not in use any more: so it is ready, and for CUDA page-locked. If
    the save before is still under way, as when nobody has waited for its future, more memory is taken rather than that
    save be spoilt. Tensors that share bytes are copied once. Not thread-safe.
    """

    _synchronize_after_execute = False

    def __init__(self) -> None:
        self._copier = ShardWriter()
        self._buffers: list[_Buffer] = []

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """The same state dict with tensors on the host that nobody else knows of. Nothing of ``state_dict`` is kept."""
        found: dict[tuple[Any, ...], torch.Tensor] = {}
        _walk(state_dict, lambda tensor: found.setdefault(_place(tensor), tensor), rebuild=False)
        chunks = [_chunk(str(i), tensor) for i, tensor in enumerate(found.values())]
        tensors = list(found.values())
        layout = Layout.build(chunks)
        early, _ = batches(layout, lambda chunk: tensors[int(chunk.name)])
        buffer = self._room(layout.file_bytes)
        self._copier.write(Plan(layout, None, early, [], {}), buffer.map, None, -1)
        views = buffer.lend(layout)
        staged = {place: views[str(i)] for i, place in enumerate(found)}
        result: dict[str, Any] = _walk(state_dict, lambda tensor: staged[_place(tensor)], rebuild=True)
        return result

    def _room(self, nbytes: int) -> _Buffer:
        """Memory that nobody uses any more."""
        until = time.monotonic() + _LINGER
        while self._buffers and not any(b.free for b in self._buffers) and time.monotonic() < until:
            time.sleep(_POLL)
        free = [buffer for buffer in self._buffers if buffer.free]
        kept = next((buffer for buffer in free if nbytes <= len(buffer.map) <= 2 * nbytes), None)
        self._buffers = [b for b in self._buffers if not b.free or b is kept]
        if kept is None:
            kept = _Buffer(nbytes)
            self._buffers.append(kept)
        return kept

    def synchronize_staging(self) -> None:
        """Nothing to wait for: ``stage`` returns when the copy is made."""

    def close(self) -> None:
        """Let go of the memory; what is still in use stays until it isn't."""
        self._copier.close()
        self._buffers.clear()


class _Buffer:
    """Private memory, in large pages where there are any: what costs most of a first copy is making small ones."""

    def __init__(self, nbytes: int) -> None:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        self.map = mmap.mmap(-1, nbytes, flags=flags)
        if sys.platform.startswith("linux") and hasattr(mmap, "MADV_HUGEPAGE"):
            self.map.madvise(mmap.MADV_HUGEPAGE)
        self._locked = page_lock(self.map)
        self._lent: Callable[[], object] = lambda: None

    @property
    def free(self) -> bool:
        """Whether the tensors that were last made of it are gone."""
        return self._lent() is None

    def lend(self, layout: Layout) -> dict[str, torch.Tensor]:
        """Tensors, by name, on the bytes of the chunks. All of them hold on to one view, whose end tells of theirs."""
        view = memoryview(self.map)
        self._lent = weakref.ref(view)
        base = len(layout.header)
        found = {}
        for chunk in layout.chunks:
            dtype, count = getattr(torch, chunk.dtype), chunk.nbytes // getattr(torch, chunk.dtype).itemsize
            flat = torch.frombuffer(view, dtype=dtype, count=count, offset=base + chunk.start) if count else None
            found[chunk.name] = torch.empty(chunk.sizes, dtype=dtype) if flat is None else flat.view(chunk.sizes)
        return found


def _walk(node: Any, give: Callable[[torch.Tensor], torch.Tensor], rebuild: bool) -> Any:
    """Call ``give`` with every tensor that lies in this process; with ``rebuild``, put its results in their place."""
    kind = type(node)
    if isinstance(node, torch.Tensor):
        return _walk_tensor(settled(node), give, rebuild)
    if kind in _DICTS:
        pairs = [(key, _walk(value, give, rebuild)) for key, value in node.items()]
        return kind(pairs) if rebuild else None
    if kind in (list, tuple):
        items = [_walk(item, give, rebuild) for item in node]
        return kind(items) if rebuild else None
    return copy.deepcopy(node) if rebuild else None


def _walk_tensor(tensor: torch.Tensor, give: Callable[[torch.Tensor], torch.Tensor], rebuild: bool) -> Any:
    if isinstance(tensor, ShardedTensor):
        shards = [(_walk(shard.tensor, give, rebuild), shard.metadata) for shard in tensor.local_shards()]
        if not rebuild:
            return None
        return ShardedTensorBase._init_from_local_shards_and_global_metadata(
            [Shard(inner, metadata) for inner, metadata in shards], tensor.metadata(), tensor.sharding_spec()
        )
    if is_traceable_wrapper_subclass(tensor):  # a DTensor, most of all
        names, context = tensor.__tensor_flatten__()
        inner = {name: getattr(tensor, name) for name in names}
        for name, part in inner.items():
            if isinstance(part, torch.Tensor):
                inner[name] = _walk(part, give, rebuild)
        if not rebuild:
            return None
        return type(tensor).__tensor_unflatten__(inner, context, tensor.size(), tensor.stride())
    if copyable(tensor):
        return give(tensor.detach())
    return tensor.detach().cpu().clone() if rebuild else None  # the writer will refuse it, by its name


def _place(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Equal for tensors of the same bytes. Lazily conjugated or negated ones have other values in them."""
    if not tensor.numel():
        return (tensor.shape, tensor.dtype)
    flags = tensor.is_conj(), tensor.is_neg()
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device, *flags


def _chunk(name: str, tensor: torch.Tensor) -> Chunk:
    shape = tuple(tensor.shape)
    return Chunk(name, str(tensor.dtype).removeprefix("torch."), shape, (0,) * len(shape), shape)
