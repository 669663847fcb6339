"""From live state to the layout of a snapshot, and the re-check that it still holds.

The layout is worked out once. Each save walks the state again (``watch``) and compares every tensor's identity,
address, shape, strides and dtype with what the layout was made from. Skipping that would save old weights after a
parameter was replaced.
"""

from __future__ import annotations

import gc
import json
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from rekindle.errors import UnsupportedValueError, UsageError
from rekindle.snapshot.documents import Receipt
from rekindle.snapshot.layout import DTYPES, PAGE, Chunk, Layout, blocks
from rekindle.state.codec import encode
from rekindle.state.fence import Fence
from rekindle.state.replicas import data_parallel, replicated_over
from rekindle.state.rng import RngState
from rekindle.state.tree import Flat, describe, flatten
from rekindle.state.watch import Watch, content
from rekindle.state.zero import ZeroState, is_zero

__all__ = ["Capture", "Plan", "batches", "unwrap"]

RNG = "rng"

_BATCH = 4 << 20
"""Bytes after which a batch is full: small enough to share out among threads, large enough to be worth handing over."""
_NAMES = 1024
"""Bytes of the header for what an optimizer keeps of one parameter: ample."""
_DEVICE_BATCH = 64 << 20
"""The same for a device's tensors, whose copies are waited for batch by batch."""


def unwrap(module: Any) -> Any:
    """The module inside DistributedDataParallel or torch.compile, so that names don't depend on the wrapping."""
    if is_zero(module):
        return ZeroState(module)
    while True:
        if isinstance(module, DistributedDataParallel):
            module = module.module
        elif isinstance(module, torch.nn.Module) and hasattr(module, "_orig_mod"):
            module = module._orig_mod
        else:
            return module


@dataclass(frozen=True)
class Unit:
    """What one copy moves: a tensor, or one checksum block of a tensor whose bytes can be copied as they lie."""

    source: torch.Tensor
    address: int
    """Where the bytes are; 0 when torch has to copy them, from a device or into order."""
    start: int
    """First byte in the shard, counted from the start of its data."""
    nbytes: int
    block: int
    """Number of its first checksum in the receipt."""
    offset: int = 0
    """Its first byte, counted from the first of ``source``."""

    def view(self, buffer: Any, base: int) -> torch.Tensor:
        """The unit's place in a shard whose data starts at byte ``base`` of ``buffer``."""
        count = self.source.numel()
        flat = torch.frombuffer(buffer, dtype=self.source.dtype, count=count, offset=base + self.start)
        return flat.view(self.source.shape)


@dataclass(frozen=True)
class Batch:
    """Some MiB of units, in the order of their bytes: what one thread copies and hashes in one go."""

    device: torch.device
    """Where all of them are."""
    units: list[Unit]


@dataclass(frozen=True)
class Plan:
    """Everything about a state that stays the same from save to save."""

    layout: Layout
    structure: Any
    early: list[Batch]
    """What may change as soon as training goes on: copied before ``step()`` returns."""
    late: list[Batch]
    """What stays as it is until the next update."""
    watched: dict[str, torch.Tensor]
    """The tensors of ``late``, by name."""

    @cached_property
    def static(self) -> bytes:
        """The part of the receipt that only changes with the layout. Not made before a commit needs it."""
        return Receipt.static_part(self.layout, self.structure)


class Capture:
    """The training state of this process, as ``state`` names it. Not thread-safe."""

    def __init__(self, state: Mapping[str, Any], rng: bool = True, allow_pickle: bool = False) -> None:
        if not isinstance(state, Mapping):
            raise UsageError(f"state is a {type(state).__name__}: give a dictionary, such as {{'model': model}}")
        self.state = {name: unwrap(entry) for name, entry in state.items()}
        for name, entry in self.state.items():
            if not isinstance(name, str) or not name:
                raise UsageError(f"state: name {name!r} is not a non-empty string")
            if not (callable(getattr(entry, "state_dict", None)) and callable(getattr(entry, "load_state_dict", None))):
                raise UsageError(
                    f"state[{name!r}] is a {type(entry).__name__} without state_dict() and load_state_dict(); "
                    "rekindle.Values(...) holds plain values"
                )
        if rng:
            if RNG in self.state:
                raise UsageError(f"state: {RNG!r} names the random generators; rename yours, or pass rng=False")
            self.state[RNG] = RngState()
        self._allow_pickle = allow_pickle
        self._fence: Fence | None = None
        self._restless: set[str] = set()
        self._watch: Watch | None = None
        self._paths: list[str] = []
        self._plan: Plan | None = None

    def prepare(self) -> tuple[Plan, bytes]:
        """The plan for the state as it is now, and its values as a JSON array.

        Raises UnsupportedValueError, naming the path, when something in the state can't be saved.
        """
        if self._fence is not None and self._fence.changed():
            self._watch = None
        values = self._watch.values() if self._watch is not None else None
        if self._plan is None or values is None:
            values = self._survey()
        assert self._plan is not None
        return self._plan, self._encode(values)

    def begin_anew(self) -> None:
        """Forget the plan: what went wrong may have to do with it."""
        self._watch = None

    def _survey(self) -> list[Any]:
        """Make a plan for the state as it is now. Returns the values."""
        with _no_collection():
            tree = {name: content(entry) for name, entry in self.state.items()}
            flat = Flat()
            flatten(tree, flat)
            self._watch = None
            self._plan = self._make_plan(tree, flat)
            self._watch = Watch(self.state, flat.tensors)
        return flat.values

    def overlap(self, fence: Fence) -> None:
        """From now on plan to copy late what ``fence`` stands before."""
        self._fence = fence

    def replicas(self, plan: Plan) -> dict[str, list[int]]:
        """By tensor: the ranks that have the same bytes of it after each update. What updates alike stays alike."""
        parameters = data_parallel()
        among = dict(parameters)
        for entry in self.state.values():
            if not isinstance(entry, (torch.optim.Optimizer, ZeroState)):
                continue
            part = list(replicated_over(entry.optimizer.process_group)) if isinstance(entry, ZeroState) else None
            for parameter, kept in entry.state.items():
                ranks = parameters.get(id(parameter)) if part is None else part
                if ranks:
                    among |= {id(tensor): ranks for tensor in kept.values()}
        return {name: among[id(tensor)] for name, tensor in plan.watched.items() if id(tensor) in among}

    def distrust(self, names: Collection[str]) -> None:
        """From now on copy these tensors inside of ``step()``: they have been seen to change after it."""
        self._restless.update(names)
        self._watch = None

    def estimate(self) -> int:
        """Bytes that a snapshot will take, before the optimizers have made their state.

        Two tensors per trained parameter are assumed for an optimizer that has none yet: what Adam and most others
        keep, and room for a counter and for their names; for torch's SGD it is known. Too much costs nothing but a
        little memory until the first save, too little costs a new allocation then.
        """
        plan, _ = self.prepare()
        later = 0
        for entry in self.state.values():
            if isinstance(entry, torch.optim.Optimizer) and not entry.state:
                trained = [p for g in entry.param_groups for p in g["params"] if p.requires_grad]
                later += sum(_kept(entry) * p.nbytes + 8 + _NAMES for p in trained) + PAGE
        return plan.layout.file_bytes + later

    def _encode(self, values: list[Any]) -> bytes:
        encoded = []
        for index, value in enumerate(values):
            try:
                encoded.append(encode(value, self._allow_pickle))
            except UnsupportedValueError as error:
                raise UnsupportedValueError(f"{self._paths[index]}: {error}") from None
        return json.dumps(encoded, separators=(",", ":"), allow_nan=False).encode()

    def _make_plan(self, tree: dict[str, Any], flat: Flat) -> Plan:
        description = describe(tree)
        self._paths = description.paths
        first: dict[tuple[Any, ...], str] = {}
        stored: dict[str, torch.Tensor] = {}
        late: dict[str, torch.Tensor] = {}
        lasting = self._fence.lasting() if self._fence is not None else set()
        for tensor, leaf in zip(flat.tensors, description.leaves, strict=True):
            _check_kind(tensor, leaf.path)
            place = _place(tensor)
            if place not in first:
                name = leaf.name
                while name in stored:  # {"a.b": x, "a": {"b": y}} are two tensors
                    name += "~"
                first[place] = name
                stored[name] = tensor
                if id(tensor) in lasting and name not in self._restless and _can_wait(tensor):
                    late[name] = tensor
            leaf.node["$tensor"] = first[place]  # tied tensors are stored once
        layout = Layout.build(_chunk(name, tensor) for name, tensor in stored.items())
        if self._plan is not None and layout == self._plan.layout:
            layout = self._plan.layout  # the same object: its header is made once
        early, behind = batches(layout, lambda chunk: stored[chunk.name], late)
        return Plan(layout, description.structure, early, behind, late)


@contextmanager
def _no_collection() -> Iterator[None]:
    """A plan is many small objects. Python's collector, looking for garbage among them, would double its cost."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _kept(optimizer: torch.optim.Optimizer) -> int:
    """Tensors that an optimizer will keep for each parameter."""
    if type(optimizer) is torch.optim.SGD:
        return int(any(group["momentum"] for group in optimizer.param_groups))
    return 2


def _can_wait(tensor: torch.Tensor) -> bool:
    """Whether it can be copied late: there is a way to, and torch counts what is written to it."""
    return tensor.device.type in ("cpu", "cuda") and not tensor.is_inference()


def _place(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Equal for tied tensors. Lazily conjugated or negated ones have other values in the same bytes."""
    if not tensor.numel():
        return (id(tensor),)
    flags = tensor.is_conj(), tensor.is_neg()
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device, *flags


def _check_kind(tensor: torch.Tensor, path: str) -> None:
    name = str(tensor.dtype).removeprefix("torch.")
    if is_lazy(tensor):
        raise UnsupportedValueError(f"{path}: has no shape yet; run the module once before making a Checkpointer")
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) and type(tensor).__torch_dispatch__ is not (
        torch.Tensor.__torch_dispatch__
    ):
        raise UnsupportedValueError(f"{path}: {type(tensor).__name__} can't be saved yet, only whole tensors can")
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_meta or name not in DTYPES:
        raise UnsupportedValueError(f"{path}: a tensor of layout {tensor.layout}, dtype {name}, device {tensor.device}")
    if tensor.numel() and not tensor.data_ptr():
        raise UnsupportedValueError(f"{path}: its memory has been freed, as by a sharded model outside of forward()")


def _chunk(name: str, tensor: torch.Tensor) -> Chunk:
    shape = tuple(tensor.shape)
    return Chunk(name, str(tensor.dtype).removeprefix("torch."), shape, (0,) * len(shape), shape)


def batches(
    layout: Layout, tensor: Callable[[Chunk], torch.Tensor], late: Collection[str] = ()
) -> tuple[list[Batch], list[Batch]]:
    """Units to copy at once, and those that can wait, in batches of one device each. ``tensor`` gives a chunk's own."""
    full: tuple[list[Batch], list[Batch]] = ([], [])
    filling: dict[tuple[bool, torch.device], tuple[Batch, int]] = {}
    block = 0
    for chunk in layout.chunks:
        source = tensor(chunk).detach()  # an alias: its memory stays ours though the tensor is given another
        which = chunk.name in late, source.device
        limit = _BATCH if source.device.type == "cpu" else _DEVICE_BATCH
        for unit in _units(chunk, source, block):
            batch, waiting = filling.get(which) or (Batch(source.device, []), 0)
            if not batch.units:
                full[which[0]].append(batch)
            batch.units.append(unit)
            waiting += unit.nbytes
            filling[which] = (batch, waiting) if waiting < limit else (Batch(source.device, []), 0)
        block += len(blocks(chunk))
    return full


def _units(chunk: Chunk, source: torch.Tensor, block: int) -> list[Unit]:
    if not chunk.nbytes:
        return []
    plain = source.device.type == "cpu" and source.is_contiguous() and not (source.is_conj() or source.is_neg())
    if not plain:
        return [Unit(source, 0, chunk.start, chunk.nbytes, block)]
    address = source.data_ptr() - chunk.start
    return [
        Unit(source, address + at, at, stop - at, block + i, at - chunk.start)
        for i, (at, stop) in enumerate(blocks(chunk))
    ]
