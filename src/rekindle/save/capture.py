"""Plans the snapshot of a live state, and checks at each save that the plan still holds.

The layout is worked out once. Each save compares every tensor's identity, address, shape, strides and dtype with what
the layout was made from (``rekindle.save.unchanged``). Skipping that would save old weights after a parameter was
replaced.
"""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from rekindle.devices.table import device_of, has_queues, on_host
from rekindle.errors import UnsupportedValueError, UsageError
from rekindle.format.layout import DTYPES, PAGE, Chunk, Layout
from rekindle.format.receipt import checksum
from rekindle.save.fence import Fence
from rekindle.save.partition import Item, partition
from rekindle.save.plan import IN_STEP, CopyPlan, Piece, batches
from rekindle.save.unchanged import StateWatch
from rekindle.settings import Overlap
from rekindle.state.codec import encode
from rekindle.state.content import StateContent
from rekindle.state.parts import LocalParts, local_parts, local_tensor
from rekindle.state.replicas import data_parallel_ranks, ranks_with_copies
from rekindle.state.rng import RNG, RngState
from rekindle.state.strides import is_negated, order_of
from rekindle.state.traits import Traits, traits_of
from rekindle.state.tree import FlatState, describe, flatten
from rekindle.state.zero import ZeroState, is_zero

__all__ = ["Capture", "unwrap"]


_OPTIMIZERS = (torch.optim.Optimizer, ZeroState)

_NAMES = 1024
"""Bytes of the header for the state that an optimizer keeps of one parameter: ample."""


def unwrap(module: Any) -> Any:
    """Returns the module, or the optimizer, inside the wrappers of torch and of frameworks.

    Names don't depend on the wrapping, and only the inner optimizer calls hooks before an update.
    """
    if is_zero(module):
        return ZeroState(module)
    while True:
        if isinstance(module, DistributedDataParallel):
            module = module.module
        elif _is_compiled(module):
            module = module._orig_mod
        elif _is_wrapper(module):
            module = module.optimizer
        else:
            return module


def _is_wrapper(entry: Any) -> bool:
    """Returns True for an optimizer that shows groups and state of another one as its own: it has nothing to be saved.

    Those of Accelerate and Lightning do. One that keeps weights or state of its own is no mere wrapper.
    """
    optimizer = torch.optim.Optimizer
    inner = getattr(entry, "optimizer", None) if isinstance(entry, optimizer) else None
    return isinstance(inner, optimizer) and entry.param_groups is inner.param_groups and entry.state is inner.state


def _is_compiled(module: Any) -> bool:
    compiler = sys.modules.get("torch._dynamo.eval_frame")  # else it can't be; to import it takes seconds
    return compiler is not None and isinstance(module, compiler.OptimizedModule)


class Capture:
    """The training state of this process, as ``state`` names it. Not thread-safe."""

    def __init__(self, state: Mapping[str, Any], *, rng: bool = True, allow_pickle: bool = False) -> None:
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
        self._unsteady: set[str] = set()
        self._watch: StateWatch | None = None
        self._paths: list[str] = []
        self._plan: CopyPlan | None = None
        self._rank, self._world, self._local_ranks, self._rank_private = 0, 1, frozenset({0}), frozenset[str]()
        self._shared_params: dict[tuple[int, ...], dict[str, LocalParts]] = {}
        """Parameters by the ranks that share them, if those are not all ranks and this is the first of them."""
        self._replicated: tuple[tuple[int, frozenset[int]] | None, dict[int, tuple[int, ...]]] = (None, {})
        self._copied_together: dict[tuple[int, ...], list[Piece]] = {}
        """Pieces by the ranks of this node that all hold them, and share the copying."""

    def prepare(self) -> tuple[CopyPlan, bytes]:
        """Returns the plan for the state as it is now, and its values as a JSON array.

        Raises UnsupportedValueError, naming the path, when something in the state can't be saved.
        """
        if self._fence is not None and self._fence.changed():
            self._watch = None
        values = self._watch.values() if self._watch is not None else None
        if self._plan is None or values is None:
            values = self._plan_anew()
        assert self._plan is not None
        return self._plan, self._encode(values)

    @property
    def paths(self) -> list[str]:
        """Path of each value that ``prepare`` returned last."""
        return self._paths

    def replan(self) -> None:
        """Make a new plan at the next save, after one that failed: the plan may be the reason."""
        self._watch = None

    def _plan_anew(self) -> list[Any]:
        """Make a plan for the state as it is now. Returns the values."""
        with _no_collection():
            contents = StateContent(self.state)
            tree = {name: contents.of(entry) for name, entry in self.state.items()}
            flat = FlatState()
            flatten(tree, flat)
            self._watch = None
            self._plan = self._make_plan(tree, flat)
            self._watch = StateWatch(self.state, contents, flat.tensors)
        return flat.values

    def use_fence(self, fence: Fence) -> None:
        """From now on plan to copy late what ``fence`` stands before."""
        self._fence = fence

    def share_with(
        self, rank: int, world: int, local_ranks: Collection[int], rank_private: Collection[str] = ()
    ) -> None:
        """From now on share with ``local_ranks``, all ranks of this node, the copying of what several of them hold.

        ``rank_private``: names of parameters of which each rank has its own, whatever others have by that name.
        """
        self._rank, self._world = rank, world
        self._local_ranks, self._rank_private = frozenset(local_ranks), frozenset(rank_private)
        self._watch = None

    def shared_params(self) -> dict[tuple[int, ...], list[str]]:
        """Maps groups of ranks, if not all, to the parameters that they share, if this is the group's first."""
        self.prepare()
        return {ranks: list(found) for ranks, found in self._shared_params.items()}

    def fingerprints(self, names: Collection[str]) -> list[tuple[str, str]]:
        """Returns (name, fingerprint of this rank's part now) of those of ``names`` that are in ``shared_params``."""
        return [
            (name, repr([(box, _content(piece)) for box, piece in held.pieces]))
            for found in self._shared_params.values()
            for name, held in found.items()
            if name in names
        ]

    def partition_digests(self) -> dict[tuple[int, ...], str]:
        """Maps each group of local replicas to a digest that its ranks must agree on."""
        self.prepare()
        owners = [(name, entry) for name, entry in self.state.items() if isinstance(entry, _OPTIMIZERS)]
        found = {}
        for ranks, pieces in self._copied_together.items():
            shared = {id(piece.counter): piece.chunk.name for piece in pieces}
            updated = [
                (
                    name,
                    sorted(shared[id(p)] for group in entry.param_groups for p in group["params"] if id(p) in shared),
                )
                for name, entry in owners
            ]
            boxes = sorted((piece.chunk.name, piece.chunk.dtype, piece.box) for piece in pieces)
            entries = [name for name in self.state if any(b[0].startswith(f"{name}.") for b in boxes)]  # order counts
            found[ranks] = checksum(repr((boxes, entries, [entry for entry in updated if entry[1]])).encode())
        return found

    def copy_in_step(self, names: Collection[str]) -> None:
        """From now on copy these tensors inside of ``step()``: they have been seen to change after it."""
        self._unsteady.update(names)
        self._watch = None

    def estimate(self) -> int:
        """Estimates the bytes of a snapshot, before the optimizers have made their state.

        Two tensors per trained parameter are assumed for an optimizer that has none yet: as many as Adam and most
        others keep, and room for a counter and for their names; for torch's SGD it is known. Too much costs a little
        memory until the first save, too little costs a new allocation then.
        """
        plan, _ = self.prepare()
        whole = plan.whole.layout.nbytes
        part = plan.layout.nbytes / whole if whole else 1.0
        later = 0
        for entry in self.state.values():
            if isinstance(entry, torch.optim.Optimizer) and not entry.state:
                trained = [local_tensor(p) for g in entry.param_groups for p in g["params"] if p.requires_grad]
                later += sum(int(part * _kept(entry) * p.nbytes) + 8 + _NAMES for p in trained) + PAGE
        return plan.layout.file_bytes + later

    def copied_in_step(self, overlap: Overlap) -> bool:
        """Returns True if ``step()`` is going to leave nothing for later, by the ``estimate``."""
        plan, _ = self.prepare()
        return overlap is False or not plan.late or (overlap == "auto" and self.is_small())

    def is_small(self) -> bool:
        """Returns True if ``step()`` can copy all of a snapshot at little cost, by the ``estimate``."""
        plan, _ = self.prepare()
        return plan.on_host and self.estimate() <= IN_STEP

    @property
    def fits_in_step(self) -> bool:
        """True if that holds for what was prepared last."""
        return self._plan is not None and self._plan.fits_in_step

    def devices(self) -> set[torch.device]:
        """Returns the devices that the state is on now, other than the host."""
        plan, _ = self.prepare()
        return plan.whole.devices

    def _encode(self, values: list[Any]) -> bytes:
        encoded = []
        for index, value in enumerate(values):
            try:
                encoded.append(encode(value, allow_pickle=self._allow_pickle))
            except UnsupportedValueError as error:
                raise UnsupportedValueError(f"{self._paths[index]}: {error}") from None
        return json.dumps(encoded, separators=(",", ":"), allow_nan=False).encode()

    def _make_plan(self, tree: dict[str, Any], flat: FlatState) -> CopyPlan:
        description = describe(tree)
        self._paths = description.paths
        first: dict[tuple[Any, ...], str] = {}
        traits: dict[tuple[Any, ...], Traits] = {}
        """Of tensors outside of modules; those of modules come back in place, and stay what they are."""
        taken: set[str] = set()
        lasting = self._fence.lasting() if self._fence is not None else set()
        known = ranks_with_copies(self.state, self._data_parallel(flat))
        private = self._private_ids(flat, [leaf.name for leaf in description.leaves])
        pieces: list[Piece] = []
        replicas: dict[str, tuple[int, ...]] = {}
        self._shared_params = {}
        for tensor, leaf in zip(flat.tensors, description.leaves, strict=True):
            held = local_parts(tensor, leaf.path)
            if not isinstance(self.state.get(leaf.entry), torch.nn.Module):
                trait = traits_of(tensor)
                if traits.setdefault(held.tie_key, trait) != trait:  # a parameter and its data are two
                    held.tie_key = (*held.tie_key, trait)
                    traits[held.tie_key] = trait
            if held.tie_key not in first:
                name = leaf.name
                while name in taken:  # {"a.b": x, "a": {"b": y}} are two tensors
                    name += "~"
                first[held.tie_key] = name
                taken.add(name)
                sure, likely = known.get(id(held.counter), ((), ()))
                own = id(held.counter) in private or not (held.sharded or sure or likely)
                ranks = held.ranks if len(held.ranks) > 1 else sure or held.ranks
                late = id(held.counter) in lasting and name not in self._unsteady and _can_wait(held.counter)
                family = (
                    () if sure and held.mesh_ranks else held.mesh_ranks or sure
                )  # both: known to be alike elsewhere, too
                if isinstance(tensor, torch.nn.Parameter) and 0 < len(family) < self._world and self._rank == family[0]:
                    self._shared_params.setdefault(family, {})[name] = held
                pieces += self._pieces(name, held, () if own else ranks, late=late, own=own)
                if late and not own and (others := likely or ranks):
                    replicas[name] = others
            leaf.node["$tensor"] = first[held.tie_key]  # tied tensors are stored once
        named = {first[place]: trait for place, trait in traits.items() if any(trait)}
        pieces = [piece.with_trait(named[piece.chunk.name]) if piece.chunk.name in named else piece for piece in pieces]
        whole = self._lay_out(pieces, description.structure, replicas, None)
        mine = self._take_part(pieces)
        return self._lay_out(mine, description.structure, replicas, whole) if self._copied_together else whole

    def _private_ids(self, flat: FlatState, names: list[str]) -> set[int]:
        """Returns ids of parameters that are each rank's own, and of the state that optimizers keep of them."""
        found = {id(tensor) for tensor, name in zip(flat.tensors, names, strict=True) if name in self._rank_private}
        owners = [entry for entry in self.state.values() if found and isinstance(entry, _OPTIMIZERS)]
        states = [kept for entry in owners for p, kept in entry.state.items() if id(p) in found]
        return found | {id(value) for kept in states if isinstance(kept, dict) for value in kept.values()}

    def _data_parallel(self, flat: FlatState) -> dict[int, tuple[int, ...]]:
        """Returns the ranks of DistributedDataParallel by parameter.

        They are sought anew only where there are other tensors than before, and not if only other kinds of tensors
        came to parameters that are all known: that takes as long as a small step.
        """
        parameters = frozenset(id(tensor) for tensor in flat.tensors if isinstance(tensor, torch.nn.Parameter))
        seen, (before, known) = (len(flat.tensors), parameters), self._replicated
        if before != seen:
            same = before is not None and before[1] == parameters and parameters <= known.keys()
            self._replicated = seen, known if same else data_parallel_ranks()
        return self._replicated[1]

    def _pieces(self, name: str, held: LocalParts, ranks: tuple[int, ...], *, late: bool, own: bool) -> list[Piece]:
        own = own and self._world > 1
        return [
            Piece(
                Chunk(name, held.dtype, held.shape, *box, 0, own, order_of(part), part.is_conj(), is_negated(part)),
                *(part, held.counter, late, ranks),
            )
            for box, part in held.pieces
        ]

    def _take_part(self, pieces: list[Piece]) -> list[Piece]:
        """Returns what this rank copies of all that it holds: its part of what others on this node hold too."""
        mine: list[Piece] = []
        common: dict[tuple[int, ...], list[Piece]] = {}
        for piece in pieces:
            ranks = tuple(sorted(self._local_ranks.intersection(piece.ranks)))
            if len(ranks) > 1 and self._rank in ranks and piece.chunk.nbytes:
                common.setdefault(ranks, []).append(piece)
            else:
                mine.append(piece)
        self._copied_together = common
        for ranks, found in common.items():
            by_item = {Item(p.chunk.name, p.box, DTYPES[p.chunk.dtype][1]): p for p in found}
            for item, rows in partition(list(by_item), ranks.index(self._rank), len(ranks)):
                mine.append(by_item[item].rows(rows))
        return mine

    def _lay_out(
        self, pieces: list[Piece], structure: Any, replicas: dict[str, tuple[int, ...]], whole: CopyPlan | None
    ) -> CopyPlan:
        layout = Layout.build(piece.chunk for piece in pieces)
        for before in [self._plan, self._plan.whole] if self._plan is not None else []:
            if layout == before.layout:
                layout = before.layout  # the same object: its header is made once
        early, late = batches(layout, {(p.chunk.name, p.chunk.offsets): p for p in pieces})
        watched = {p.chunk.name: p.counter for p in pieces if p.late}
        plan = CopyPlan(layout, structure, early, late, watched, replicas, whole)
        if self._fence is not None:
            self._fence.devices = plan.whole.devices
        return plan


def _content(tensor: torch.Tensor) -> str:
    """Returns a checksum of a tensor's bytes."""
    return checksum(memoryview(tensor.contiguous().cpu().view(-1).view(torch.uint8).numpy()))  # type: ignore[arg-type]


@contextmanager
def _no_collection() -> Iterator[None]:
    """Keep Python's collector away: a plan is many small objects, and collecting among them would double its cost."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _kept(optimizer: torch.optim.Optimizer) -> int:
    """Returns the number of tensors that an optimizer will keep for each parameter."""
    if type(optimizer) is torch.optim.SGD:
        return int(any(group["momentum"] for group in optimizer.param_groups))
    return 2


def _can_wait(tensor: torch.Tensor) -> bool:
    """Returns True if it can be copied late: there is a way to, and torch counts what is written to it."""
    return (on_host(tensor) or has_queues(device_of(tensor))) and not tensor.is_inference()
