"""Forms replica groups: a sharded optimizer's state is held more than once, so that no rank's death loses any of it."""

from __future__ import annotations

import gc
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from rekindle.errors import UsageError
from rekindle.state.parts import is_dtensor, local_parts
from rekindle.state.zero import ZeroState

__all__ = ["ReplicaGroup", "ranks_with_copies", "data_parallel_ranks", "replica_groups", "parent_ranks"]

_parents: dict[tuple[int, ...], tuple[int, ...]] = {}
"""Maps the ranks of a part to those of the group that was split. Global to the process, as process groups are."""


@dataclass(frozen=True)
class ReplicaGroup:
    """Describes this rank's part of a data-parallel group. The ranks of a part hold one whole copy together."""

    group: dist.ProcessGroup
    """Process group of the part: the one to shard the optimizer over."""
    host: dist.ProcessGroup
    """Gloo group of the same ranks, for traffic between host memories."""
    ranks: tuple[int, ...]
    """Global ranks of the part."""
    parts: tuple[tuple[int, ...], ...]
    """Global ranks of all parts."""

    def mesh(self, device_type: str) -> DeviceMesh:
        """Returns the mesh ``("replicate", "shard")`` for ``fully_shard``: shards in a part, replicas between parts.

        A collective of all ranks of the job. Raises UsageError when the parts differ in size.
        """
        if len({len(part) for part in self.parts}) > 1:
            raise UsageError(f"no mesh can have parts of different sizes: {[list(part) for part in self.parts]}")
        return DeviceMesh(device_type, torch.tensor(self.parts, device="cpu"), mesh_dim_names=("replicate", "shard"))


def replica_groups(
    group: dist.ProcessGroup | None = None, copies: int = 2, timeout: timedelta = timedelta(minutes=30)
) -> ReplicaGroup:
    """Splits a data-parallel group into ``copies`` parts, each of which can hold all of a sharded optimizer's state.

    Gradients go on being averaged over the whole group, so that all parts compute the same updates and their copies
    stay alike without being exchanged; only the shards are larger. A rank keeps 1/n of the optimizer's state for parts
    of n ranks: ``copies`` times what sharding over the whole group would take. Parts are filled node by node, so that
    they lie on different nodes if there are that many; where the size doesn't divide, the first have one rank more.

    A collective of the group's ranks. Raises UsageError, naming the ranks, when there are fewer than ``copies``.
    """
    parent = tuple(dist.get_process_group_ranks(group if group is not None else dist.group.WORLD))
    if not isinstance(copies, int) or not 1 <= copies <= len(parent):
        raise UsageError(f"copies is {copies!r}: must be 1 to {len(parent)} for the group of ranks {list(parent)}")
    hosts: list[str] = [""] * len(parent)
    dist.all_gather_object(hosts, socket.gethostname(), group=group)
    first = {host: parent[hosts.index(host)] for host in hosts}
    order = [rank for _, rank in sorted((first[host], rank) for host, rank in zip(hosts, parent, strict=True))]
    size, more = divmod(len(order), copies)
    parts, at = [], 0
    for number in range(copies):
        stop = at + size + (number < more)
        parts.append(tuple(sorted(order[at:stop])))
        at = stop
    mine = next(part for part in parts if dist.get_rank() in part)
    # Only the part's ranks take part, so that several groups, dense and expert ones, can be split one after the other.
    made = dist.new_group(list(mine), timeout=timeout, use_local_synchronization=True)
    host = made
    if "gloo" not in dist.get_backend(made):
        host = dist.new_group(list(mine), timeout=timeout, backend="gloo", use_local_synchronization=True)
    _parents[mine] = parent
    return ReplicaGroup(made, host, mine, tuple(parts))


def data_parallel_ranks() -> dict[int, tuple[int, ...]]:
    """Maps the ``id`` of a parameter to the ranks that DistributedDataParallel keeps equal, unless a hook may not.

    A state usually has the wrapped module, which doesn't know its wrapper.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return {}
    return {
        id(parameter): ranks
        for module in _wrappers()
        if all(map(_keeps_alike, module._comm_hooks))
        for ranks in [tuple(sorted(dist.get_process_group_ranks(module.process_group)))]
        for parameter in module._module_parameters  # its parameters at its creation
    }


def _wrappers() -> list[DistributedDataParallel]:
    """Returns all DistributedDataParallel modules of this process, by a search of its objects: 15 ms for 300,000.

    Types are compared by identity: to ask each for its bases takes longer, and some can't be asked for a hash.
    """
    objects: list[Any] = gc.get_objects()
    return [thing for kind in _kinds(DistributedDataParallel) for thing in objects if type(thing) is kind]


def _kinds(kind: type[Any]) -> list[Any]:
    """Returns a type and all that are derived from it."""
    return [kind, *(derived for own in type.__subclasses__(kind) for derived in _kinds(own))]


def _keeps_alike(hook: tuple[Any, Any]) -> bool:
    """True if a hook in place of DDP's averaging gives all ranks the same gradients.

    Hooks should. Torch's own local SGD lets the ranks differ for some steps.
    """
    return "post_localSGD" not in str(getattr(hook[0], "__module__", ""))


def ranks_with_copies(
    state: Mapping[str, Any], parameters: Mapping[int, tuple[int, ...]]
) -> dict[int, tuple[tuple[int, ...], tuple[int, ...]]]:
    """Maps the ``id`` of a tensor to (all ranks that hold the same, ranks among which copies exist).

    Covers tensors that don't tell it themselves: ``parameters``, from ``data_parallel_ranks``, and optimizer state.
    """
    found = {key: (ranks, ranks) for key, ranks in parameters.items()}
    for entry in state.values():
        if isinstance(entry, ZeroState):
            part = parent_ranks(entry.optimizer.process_group)
            found |= {id(tensor): ((), part) for kept in entry.state.values() for tensor in kept.values()}
        elif isinstance(entry, torch.optim.Optimizer):
            trained = [p for group in entry.param_groups for p in group["params"] if p.requires_grad]
            all_kept = all(p in entry.state for p in trained)  # else ranks may divide the updates among them
            for parameter, kept in entry.state.items():
                ranks = parameters.get(id(parameter), ()) if all_kept else ()
                for tensor in kept.values() if isinstance(kept, dict) else ():
                    if ranks or (isinstance(tensor, torch.Tensor) and not tensor.dim()):
                        found[id(tensor)] = (ranks, ranks) if ranks else _of(parameter)
    return found


def _of(parameter: torch.Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns the ranks that have the same update count of a sharded parameter: those that hold the same shard."""
    ranks = local_parts(parameter, "").ranks if is_dtensor(parameter) else ()
    return ranks, ranks


def parent_ranks(group: dist.ProcessGroup) -> tuple[int, ...]:
    """Returns the ranks of the group of which ``group`` is a part, which hold copies; none if it isn't a part."""
    return _parents.get(tuple(dist.get_process_group_ranks(group)), ())
