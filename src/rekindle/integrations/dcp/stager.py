"""Implements DCP's ``AsyncStager``: copies a state dict in one pass into host memory, which is used from save to
save."""

from __future__ import annotations

import copy
import ctypes
import mmap
import sys
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor, ShardedTensorBase
from torch.distributed._shard.sharded_tensor.shard import Shard
from torch.distributed.checkpoint.staging import AsyncStager
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from rekindle.devices.batches import copy_in_batches
from rekindle.devices.bounce import copy_by_bounce
from rekindle.devices.page_lock import PageLocker
from rekindle.devices.streams import copy_now
from rekindle.devices.table import device_of, has_queues, on_host
from rekindle.format.reader import reader_threads
from rekindle.integrations.dcp.items import copyable, wait_for_collective

__all__ = ["RekindleStager"]

_DICTS = (dict, OrderedDict)
_ALIGN = 64
_SMALL = 1 << 20
"""Bytes of a tensor that is not worth a task of a thread."""
_PIECE = 8 << 20
"""Bytes that a thread copies in one go."""
_LINGER, _POLL = 0.05, 0.001
"""Seconds that a save's thread may take to let go of what it has saved, once its future is done. Making memory takes
longer."""


class RekindleStager(AsyncStager):
    """Copies state dicts for ``dcp.async_save``, with all of this rank's cores; training may go on once it returns.

    The memory is that of an earlier copy, if that is not in use any more: so it is ready, and for CUDA page-locked. If
    the save before is still under way, as when nobody has waited for its future, more memory is taken rather than that
    save be spoilt. Tensors that are the same bytes are copied once. Not thread-safe.
    """

    _synchronize_after_execute = False

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(reader_threads(in_memory=True), thread_name_prefix="rekindle-stage")
        self._page_lock = PageLocker().lock
        self._buffers: list[_Buffer] = []

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Returns the same state dict with private tensors on the host. Keeps nothing of ``state_dict``."""
        sources: list[torch.Tensor] = []
        known: dict[tuple[Any, ...], int] = {}
        order: list[int] = []

        def note(tensor: torch.Tensor) -> torch.Tensor:
            number = known.setdefault(_bytes_key(tensor), len(sources))
            if number == len(sources):
                sources.append(tensor)
            order.append(number)
            return tensor

        _walk(state_dict, note, rebuild=False)
        staged = self._copy(sources)
        following = iter(order)
        result: dict[str, Any] = _walk(state_dict, lambda _: staged[next(following)], rebuild=True)
        return result

    def _copy(self, sources: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        places, end = [], 0
        for source in sources:
            places.append(end)
            end += -(-source.nbytes // _ALIGN) * _ALIGN
        buffer = self._free_buffer(max(end, _ALIGN))
        memory = buffer.lend()
        copies = [
            memory[at : at + source.nbytes].view(source.dtype).view(source.shape)
            for at, source in zip(places, sources, strict=True)
        ]
        large: list[tuple[int, int, int]] = []
        rest: dict[torch.device, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
        for to, source in zip(copies, sources, strict=True):
            if source.nbytes > _SMALL and _plain(source):
                begin = range(0, source.nbytes, _PIECE)
                large += [(to.data_ptr() + i, source.data_ptr() + i, min(_PIECE, source.nbytes - i)) for i in begin]
            else:
                pair = rest.setdefault(device_of(source), ([], []))
                pair[0].append(to)
                pair[1].append(source)
        moves = self._threads.map(lambda piece: ctypes.memmove(*piece), large)
        try:
            for device, pair in rest.items():
                if buffer.page_locked or not has_queues(device):
                    copy_in_batches(device, *pair)
                else:
                    copy_by_bounce(device, partial(copy_now, device), *pair)
        finally:
            for _ in moves:  # else threads might still read and write what others are given
                pass
        return copies

    def _free_buffer(self, nbytes: int) -> _Buffer:
        """Returns memory that is not in use any more."""
        until = time.monotonic() + _LINGER
        while self._buffers and not any(b.free for b in self._buffers) and time.monotonic() < until:
            time.sleep(_POLL)
        free = [buffer for buffer in self._buffers if buffer.free]
        kept = next((buffer for buffer in free if nbytes <= len(buffer.map) <= 2 * nbytes), None)
        self._buffers = [b for b in self._buffers if not b.free or b is kept]
        if kept is None:
            kept = _Buffer(nbytes, self._page_lock)
            self._buffers.append(kept)
        return kept

    def synchronize_staging(self) -> None:
        """Returns at once: ``stage`` returns when the copy is made."""

    def close(self) -> None:
        """Lets go of the memory; what is still in use stays until it isn't."""
        self._threads.shutdown()
        self._buffers.clear()


class _Buffer:
    """Private memory, in large pages where there are any: making small ones costs most of a first copy."""

    def __init__(self, nbytes: int, page_lock: Callable[[mmap.mmap], object]) -> None:
        self.map = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if sys.platform.startswith("linux"):
            self.map.madvise(mmap.MADV_HUGEPAGE)
        self._locked = page_lock(self.map)
        self._lent: Callable[[], object] = lambda: None

    @property
    def page_locked(self) -> bool:
        """True if devices may copy straight into it."""
        return self._locked is not None

    @property
    def free(self) -> bool:
        """True if all tensors that were made of what was lent are gone."""
        return self._lent() is None

    def lend(self) -> torch.Tensor:
        """Lends the bytes. All made of them hold on to one view of the memory, so the end of that view tells of
        theirs."""
        view = memoryview(self.map)
        self._lent = weakref.ref(view)
        return torch.frombuffer(view, dtype=torch.uint8)


def _plain(tensor: torch.Tensor) -> bool:
    """Returns True if its bytes can be copied as they lie."""
    return on_host(tensor) and tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg())


def _walk(node: Any, give: Callable[[torch.Tensor], torch.Tensor], rebuild: bool) -> Any:
    """Calls ``give`` with every tensor that lies in this process; with ``rebuild``, puts its results in their place."""
    kind = type(node)
    if isinstance(node, torch.Tensor):
        return _walk_tensor(wait_for_collective(node), give, rebuild)
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


def _bytes_key(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Returns a key that is equal for tensors of the same bytes. Lazily conjugated or negated ones have other
    values."""
    if not tensor.numel():
        return (tensor.shape, tensor.dtype)
    flags = tensor.is_conj(), tensor.is_neg()
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device, *flags
