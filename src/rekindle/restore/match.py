"""Matches a checkpoint with the live state: finds which boxes of which tensors go where. Changes nothing live."""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from rekindle.errors import CorruptError, StateMismatchError
from rekindle.format.boxes import Box
from rekindle.format.layout import Chunk
from rekindle.restore.reshard import Want
from rekindle.restore.saved import Node, Saved
from rekindle.state.content import StateContent, is_plain_optimizer
from rekindle.state.flat import is_flat
from rekindle.state.names import canonical_names
from rekindle.state.parts import (
    FlatPart,
    Leaf,
    dtype_name,
    is_dtensor,
    is_leaf,
    local_parts,
    local_tensor,
    replicate_like,
)
from rekindle.state.placed import PlacedState
from rekindle.state.rng import RNG, RngState
from rekindle.state.strides import empty_for, order_of
from rekindle.state.tree import entries
from rekindle.state.zero import ZeroState, number_parameters

__all__ = ["Match", "Target", "mismatch"]


@dataclass
class Target:
    """A tensor that is to be filled, as far as this process holds it."""

    name: str
    """Its name in the checkpoint."""
    entry: str
    leaf: Leaf
    pieces: list[tuple[Box, torch.Tensor]]
    live: bool
    """True if it is the live state's own, so that filling it shows at once."""


@dataclass
class Match:
    """The live ``state`` beside the receipts in ``saved``."""

    state: Mapping[str, Any]
    saved: Saved
    parts: frozenset[str] | None = None
    """Entries of the state to look for; None for all of them."""
    casts: bool = False
    """True if tensors of modules may have another dtype than the live ones: loading casts them, as torch does."""
    targets: dict[tuple[str, str], Target] = field(default_factory=dict)
    """By entry of the state and name in the checkpoint."""
    names: dict[str, dict[int, list[Any]]] = field(default_factory=dict)
    """By optimizer and id of the parameter: its names in the checkpoint."""
    kept: dict[str, dict[Any, Any]] = field(default_factory=dict)
    """By optimizer and number of the parameter: the tensors and nodes of values to keep of it; those that belong to
    no parameter by their own key."""
    problems: list[str] = field(default_factory=list)
    """Sentences, each about something that doesn't match."""
    lacking: list[str] = field(default_factory=list)
    """Names that the live state has, and no receipt mentions."""
    absent: list[str] = field(default_factory=list)
    """Tensors that receipts mention, and of which none has even a part."""
    unsure: bool = False
    """True if receipts that haven't been read may have more that is wanted."""
    surplus: set[str] = field(default_factory=set)
    """Names that this rank had when it was saved, and has no place for now."""
    parameters: set[str] = field(default_factory=set)
    """Names, in the checkpoint, of parameters and of what optimizers keep of them."""

    counts: dict[str, tuple[int, int]] = field(default_factory=dict)
    """By entry: how many of its tensors, parameters or values match the checkpoint's, and of how many."""

    def __post_init__(self) -> None:
        """Matches entry by entry; modules first, since they give the names of the parameters that optimizers have."""
        self.contents = StateContent(dict(self.state))
        self._claims = Claims()
        self._stored: dict[int, str] = {}
        """By id of a live parameter: its name in the checkpoint."""
        self._resizing: dict[str, set[str]] = {}
        """By module: its tensors whose shape depends on data, so that loading sets it."""
        self._misfits: set[int] = set()
        """Ids of parameters that the checkpoint has other tensors for by that name."""
        there = entries(self.saved.home.structure)
        self.surplus |= {repr(name) for name in there if name not in self.state and name != RNG}
        modules_first = sorted(self.state.items(), key=lambda item: not isinstance(item[1], torch.nn.Module))
        for name, entry in modules_first:
            if not self.chosen(name):
                continue
            saved = self.saved.entry(name)
            if saved is None:
                if not isinstance(entry, RngState):  # else a job that began without it
                    self.lacking.append(repr(name))
                    self.counts[name] = 0, 1
            elif isinstance(entry, torch.nn.Module):
                self._match_module(name, entry)
            elif isinstance(entry, PlacedState):
                self._match_children(name, self.contents.of(entry), set())
            elif isinstance(entry, ZeroState) or is_plain_optimizer(entry, entry.state_dict()):
                self._match_optimizer(name, entry)
            else:
                self._match_other(saved.body, entry.state_dict())
                self.counts[name] = 1, 1

    def chosen(self, name: str) -> bool:
        """Returns True if an entry of the state is to be loaded."""
        return self.parts is None or name in self.parts

    @property
    def wants(self) -> list[tuple[Target, Want, torch.Tensor]]:
        """Boxes of tensors that are to be filled, each with its target and the live memory for it."""
        return [
            (target, Want(target.name, box), tensor)
            for target in self.targets.values()
            for box, tensor in target.pieces
            if box.volume
        ]

    def has(self, entry: str, node: Node) -> bool:
        """Returns True unless a child of an entry is a tensor without a target."""
        stored = node.body.get("$tensor") if isinstance(node.body, dict) else None
        return stored is None or (entry, stored) in self.targets

    def tensor(self, entry: str, name: str) -> torch.Tensor:
        """Returns the tensor that has been filled with the checkpoint's ``name``."""
        target = self.targets.get((entry, name)) or self.targets["", name]
        assert isinstance(target.leaf, torch.Tensor)
        return target.leaf

    def _target(self, entry: str, name: str, leaf: Leaf, *, live: bool) -> None:
        """Makes a tensor the target of the checkpoint's ``name``, unless the entry has one for it."""
        if (entry, name) not in self.targets:
            held = local_parts(leaf, name)
            self.targets[entry, name] = Target(name, entry, leaf, held.pieces, live)

    def new(self, entry: str, name: str, like: Leaf | None = None) -> Leaf:
        """Makes a tensor for the checkpoint's ``name``, sharded as ``like`` is, if that has its shape.

        Else it is whole on each rank of ``like``'s mesh: such are sums over rows that an optimizer keeps of a sharded
        parameter. Counters are plain tensors whatever the parameter is.
        """
        if (entry, name) in self.targets:
            return self.targets[entry, name].leaf
        chunk = self.saved.chunk(name)
        if chunk is None:
            self.absent.append(name)
            return torch.empty(0, device="cpu")
        shape = chunk.global_shape
        leaf: Leaf
        try:
            if is_dtensor(like) and tuple(like.shape) == shape:
                leaf = torch.empty_like(like.detach(), dtype=getattr(torch, chunk.dtype))
            elif is_dtensor(like) and shape and not self.saved.own(name):
                leaf = replicate_like(empty_for(chunk, chunk.order, local_tensor(like).device), like)
            else:
                leaf = empty_for(chunk, self._order(chunk, like))
        except (RuntimeError, TypeError) as error:
            raise CorruptError(f"{name}: there is no room for a {chunk.dtype}{list(shape)}") from error
        self._target(entry, name, leaf, live=False)
        return leaf

    def _order(self, chunk: Chunk, like: Leaf | None) -> tuple[int, ...]:
        """Returns the order of dimensions in memory: the saved one, or the parameter's, if it lay as its parameter did.

        Kernels that walk through memory, as those of fused optimizers, would else pair wrong elements.
        """
        if isinstance(like, torch.Tensor) and like.shape == chunk.global_shape:
            parameter = self.saved.chunk(self._stored.get(id(like), ""))
            if parameter is not None and parameter.order == chunk.order:
                return order_of(like)
        return chunk.order

    # -- modules ------------------------------------------------------------------------------------------------

    def _match_module(self, name: str, module: torch.nn.Module) -> None:
        """Matches a module tensor by tensor."""
        names = canonical_names(module)
        self._resizing[name] = {names[key] for key in _resizing(module) if key in names}
        self._match_children(name, self.contents.of(module), {key for key, _ in module.named_parameters()})

    def _match_children(self, name: str, live: Mapping[str, Any], owned: set[str]) -> None:
        """Matches what an entry has by name. ``owned``: names of parameters."""
        before = len(self.lacking) + len(self.problems)
        for key, leaf in live.items():
            node = self.saved.child(name, key)
            if node is None:
                self.lacking.append(f"{name}.{key}")
            elif is_leaf(leaf):
                self._match_module_tensor(name, key, leaf, node, parameter=key in owned)
            else:
                self._match_other(node.body, leaf)
        misses = len(self.lacking) + len(self.problems) - before
        self.counts[name] = len(live) - misses, len(live)
        self.surplus |= {f"{name}.{key}" for key in self.saved.children(name) if key not in live}

    def _match_module_tensor(self, name: str, key: str, leaf: Leaf, node: Node, *, parameter: bool) -> None:
        """Matches a tensor of a module with the node that the checkpoint has at its place."""
        stored = node.body.get("$tensor") if isinstance(node.body, dict) else None
        if stored is None:
            self.problems.append(f"{name}.{key}: a tensor in the live state, none in the checkpoint")
            return
        if parameter:
            self.parameters.add(stored)
            self._stored[id(leaf)] = stored
        self._aim(name, f"{name}.{key}", stored, leaf)

    def _aim(self, entry: str, path: str, stored: str, leaf: Leaf) -> None:
        """Aims the checkpoint's ``stored`` at a live tensor."""
        kind = self.saved.kind(stored)
        if kind is None:
            self.absent.append(stored)
            return
        ours = (dtype_name(local_tensor(leaf)), tuple(leaf.shape))
        resized = ours[0] == kind[0] and path.removeprefix(f"{entry}.") in self._resizing.get(entry, ())
        if ours != kind and self._casts(leaf, kind):
            self.new(entry, stored, leaf)
        elif ours != kind and (resized or self._widens(entry, leaf, kind)):
            self.new(entry, stored)
        elif ours != kind:
            self._misfits.add(id(leaf.counter if isinstance(leaf, FlatPart) else leaf))
            self.problems.append(f"{path}: live {ours[0]}{list(ours[1])}, saved {kind[0]}{list(kind[1])}")
        elif (entry, stored) not in self.targets:
            if self._claims.add(leaf):
                self._target(entry, stored, leaf, live=True)
            else:
                self.new(entry, stored)  # load_state_dict() will know how to copy it

    def _casts(self, leaf: Leaf, kind: tuple[str, tuple[int, ...]]) -> bool:
        """Returns True for a tensor that differs in its dtype alone, and can be cast."""
        if not self.casts or isinstance(leaf, FlatPart) or tuple(leaf.shape) != kind[1]:
            return False
        return torch.can_cast(getattr(torch, kind[0]), leaf.dtype)

    def _widens(self, entry: str, leaf: Leaf, kind: tuple[str, tuple[int, ...]]) -> bool:
        """Returns True for a buffer that FullyShardedDataParallel will cast, at its first use, to what was saved."""
        if not is_flat(self.state[entry]) or isinstance(leaf, (FlatPart, torch.nn.Parameter)):
            return False
        saved = getattr(torch, kind[0])
        return tuple(leaf.shape) == kind[1] and torch.promote_types(leaf.dtype, saved) == leaf.dtype

    # -- optimizers ---------------------------------------------------------------------------------------------

    def _match_optimizer(self, name: str, entry: Any) -> None:
        """Matches an optimizer parameter by parameter, by their names: their numbers depend on the code."""
        every = number_parameters(entry.param_groups)
        names = self.names[name] = self._names(name, entry)
        owned = entry.owned if isinstance(entry, ZeroState) else set(names)
        self.kept[name] = {}
        for number, parameter in every.items():
            if id(parameter) in owned:
                self._match_state(name, entry, number, parameter, names[id(parameter)])
        self._match_groups(name, entry, names)
        live = {key for own in names.values() for key in own}
        matching = [key for at, own in names.items() for key in own if at not in self._misfits]
        self.counts[name] = sum(self.saved.group_of(name, key) is not None for key in matching), len(live)
        for key, node in self.saved.beside(name):
            self._match_other(node.body, None)
            self.kept[name][key] = node
        self.surplus |= {f"{name}: parameter {key!r}" for key in set(self.saved.parameters(name)) - live}
        home = self.saved.entry(name)
        for key, child in entries(home.body).items() if home is not None else ():
            if key not in ("state", "param_groups"):
                self._match_other(child, None)

    def _match_state(
        self, name: str, entry: Any, number: int, parameter: torch.Tensor, own_names: Sequence[Any]
    ) -> None:
        """Matches what an optimizer keeps of one parameter, which is several in the checkpoint if it is flattened."""
        kept: dict[str, Any] = {}
        runs = self.contents.runs(parameter)
        if runs is not None and not parameter.numel():
            return  # all of it is on other ranks: it has no gradients here, so a counter would be that of the restart
        for at, own_name in enumerate(own_names):
            node = self.saved.kept(name, own_name)
            if node is None:
                self.unsure = self.unsure or parameter.requires_grad  # a frozen one never has any
                continue
            if id(parameter) in self._misfits:
                self.surplus.add(f"{name}: what it kept of {own_name!r}")
                continue
            if not entries(node.body):  # not a dictionary, or an empty one
                self._match_nested(node.body, parameter)
                self.kept[name][number] = node
                continue
            live = entry.state.get(parameter, {})
            for key, child in entries(node.body).items():
                run = runs[at] if runs is not None else None
                found = live.get(key) if isinstance(live, dict) else None
                self._match_kept(name, parameter, run, found, kept, key, Node(child, node.receipt))
        if kept:
            self.kept[name][number] = kept

    def _names(self, name: str, entry: Any) -> dict[int, list[Any]]:
        """Returns the checkpoint's names of an optimizer's parameters, by their ids.

        By number where it has nothing but those, as an imported one may. By its place one that had a name, and has none
        now, or the other way round: a module has replaced it.
        """
        names = self.contents.names(entry)
        saved = self.saved.parameters(name)
        every = number_parameters(entry.param_groups)
        if not saved or any(map(self.contents.runs, every.values())):
            return names
        if all(type(key) is int for key in saved):
            return {id(p): [n] for n, p in every.items()}
        live = {key for own in names.values() for key in own}
        for number, parameter in every.items() if len(saved) == len(every) else ():
            (own,), there = names[id(parameter)], saved[number]
            if own not in saved and there not in live and int in (type(own), type(there)):
                names[id(parameter)] = [there]
        return names

    def _match_kept(
        self, name: str, parameter: torch.Tensor, run: Any, live: Any, kept: dict[str, Any], key: str, node: Node
    ) -> None:
        """Matches one thing that an optimizer keeps of a parameter: a live tensor takes it if it can, else a new one.

        ``run`` is the parameter's part of a flattened one. Then the tensors of all its parts become one, as it is one.
        """
        stored = node.body.get("$tensor") if isinstance(node.body, dict) else None
        if stored is None:
            self._match_nested(node.body, parameter)
            kept[key] = node
            return
        self.parameters.add(stored)
        kind = self.saved.kind(stored)
        if kind is None:
            self.absent.append(stored)
            return
        if run is not None and kind[1] == run.shape and run.shape:
            flat = kept.get(key)
            if flat is None:
                fits = isinstance(live, torch.Tensor) and live.shape == parameter.shape and dtype_name(live) == kind[0]
                device, dtype = parameter.device, getattr(torch, kind[0])
                flat = kept[key] = live if fits else torch.zeros(parameter.shape, dtype=dtype, device=device)
            self._target(name, stored, run.of(flat, flat), live=flat is live)
            return
        fits = isinstance(live, torch.Tensor) and (dtype_name(local_tensor(live)), tuple(live.shape)) == kind
        if fits and (name, stored) not in self.targets and self._claims.add(live):
            self._target(name, stored, live, live=True)
        kept[key] = self.new(name, stored, parameter)

    def _match_nested(self, body: Any, parameter: torch.Tensor) -> None:
        """Makes a tensor for each one in a structure that an optimizer keeps of a parameter."""
        for stored, _ in _pairs(body, None):
            self.new("", stored, parameter)

    def _match_groups(self, name: str, entry: Any, names: dict[int, list[Any]]) -> None:
        """Matches each group with the saved one of its parameters, whatever its number was."""
        for number, group in enumerate(entry.param_groups):
            own = [key for parameter in group["params"] for key in names[id(parameter)]]
            found = {key: self.saved.group_of(name, key) for key in own}
            self.lacking += [f"{name}: parameter {key!r}" for key, node in found.items() if node is None]
            nodes = [node for node in found.values() if node is not None]
            options = [_options(node) for node in nodes]
            for node in nodes[:1]:
                self._match_other(node.body, group)
                there, here = set(entries(node.body)), set(group)
                if there - here and here - there:  # newer versions of torch have more, and never both
                    self.problems.append(
                        f"{name}: is another kind of optimizer: group {number} has {_some(here - there)}, "
                        f"and had {_some(there - here)}"
                    )
            if any(other != options[0] for other in options[1:]):
                self.problems.append(f"{name}: parameters of group {number} were in groups of different options")

    # -- anything else ------------------------------------------------------------------------------------------

    def _match_other(self, body: Any, live: Any) -> None:
        """Makes tensors for entries that keep what they are given. Each is made once, so tensors that were tied
        still are."""
        for stored, leaf in _pairs(body, live):
            self.new("", stored, leaf)


def _resizing(module: torch.nn.Module) -> Iterator[str]:
    """Names tensors of parts that load them in a way of their own, as the observers of quantization do.

    torch's layers do that too, and only to read what older versions of themselves have written.
    """
    for prefix, part in module.named_modules(remove_duplicate=False):
        if not type(part)._load_from_state_dict.__module__.startswith("torch.nn."):
            yield from (f"{prefix}.{key}" if prefix else key for key in [*part._parameters, *part._buffers])


class Claims:
    """Memory that is claimed: two saved tensors must never be written into the same bytes at a time."""

    def __init__(self) -> None:
        self._ranges: dict[torch.device, list[tuple[int, int]]] = {}

    def add(self, leaf: Leaf) -> bool:
        """Claims the memory of a leaf.

        False, and nothing claimed, where bytes can't be put into the tensor's own memory, or a part is taken.
        """
        tensor = local_tensor(leaf)
        if isinstance(leaf, FlatPart):
            start = tensor.data_ptr() + leaf.start * tensor.element_size()
            return self._claim(tensor.device, start, start + (leaf.last - leaf.first) * tensor.element_size())
        if not _can_be_filled(tensor):
            return not tensor.numel() and is_dtensor(leaf)  # an empty part
        span = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
        return self._claim(tensor.device, tensor.data_ptr(), tensor.data_ptr() + span * tensor.element_size())

    def _claim(self, device: torch.device, start: int, stop: int) -> bool:
        """Claims the addresses from ``start`` to ``stop``. False if some of them are claimed already."""
        ranges = self._ranges.setdefault(device, [])
        at = bisect.bisect(ranges, (start, stop))
        if (at and ranges[at - 1][1] > start) or (at < len(ranges) and ranges[at][0] < stop):
            return False
        if start < stop:
            ranges.insert(at, (start, stop))
        return True


def _can_be_filled(tensor: torch.Tensor) -> bool:
    """True if a tensor's elements lie in memory of its own as their bytes are saved, each at an address of its own."""
    return (
        type(tensor).__torch_dispatch__ is torch.Tensor.__torch_dispatch__
        and tensor.layout is torch.strided
        and tensor.numel() > 0
        and not (tensor.is_meta or tensor.is_nested or tensor.is_conj() or tensor.is_neg())
        and tensor.data_ptr() != 0
        and all(stride > 0 or size == 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    )


def _some(keys: set[Any]) -> str:
    return ", ".join(sorted(map(str, keys))[:4])


def _options(node: Node) -> dict[str, Any]:
    """Returns a group's options, as they are saved."""
    return {key: _values(body, node) for key, body in entries(node.body).items() if key != "params"}


def _values(body: Any, node: Node) -> Any:
    """Returns a structure with its values, still encoded, in the places of their numbers."""
    if isinstance(body, dict) and "$value" in body:
        return node.receipt.values[body["$value"]]
    if isinstance(body, dict):
        return {key: _values(child, node) for key, child in body.items()}
    return [_values(child, node) for child in body] if isinstance(body, list) else body


def _pairs(body: Any, live: Any) -> Iterator[tuple[str, Any]]:
    """Iterates over the tensors of a structure, each with what the live state has at its place."""
    if isinstance(body, list):
        items = live if isinstance(live, (list, tuple)) else ()
        for number, child in enumerate(body):
            yield from _pairs(child, items[number] if number < len(items) else None)
    elif isinstance(body, dict):
        if isinstance(body.get("$tensor"), str):
            yield body["$tensor"], live
        elif "$tuple" in body:
            yield from _pairs(body["$tuple"], live)
        else:
            for key, child in entries(body).items():
                yield from _pairs(child, live.get(key) if isinstance(live, Mapping) else None)


def mismatch(problems: list[str]) -> StateMismatchError:
    """Makes the error that names the first of the ``problems``, and tells how to load the rest."""
    more = f" (and {len(problems) - 5} more)" if len(problems) > 5 else ""
    hint = "; if this is another run's root, choose another one; else restore(partial=True) loads what fits"
    return StateMismatchError("; ".join(sorted(problems)[:5]) + more + hint)
