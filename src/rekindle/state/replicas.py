"""Replica groups: a sharded optimizer's state, held more than once, so that the death of a rank takes nothing along."""

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

_over: dict[tuple[int, ...], tuple[int, ...]] = {}
"""By the ranks of a part: those of the group that it is a part of."""


@dataclass(frozen=True)
class ReplicaGroup:
    """This rank's part of a data-parallel group. Together the part's ranks hold one whole copy."""

    group: dist.ProcessGroup
    """Shard the optimizer over this one."""
    host: dist.ProcessGroup
    """The same ranks, over gloo: for traffic between hosts' memories."""
    ranks: tuple[int, ...]
    """Global ranks of the part."""
    parts: tuple[tuple[int, ...], ...]
    """All parts."""

    def mesh(self, device_type: str) -> DeviceMesh:
        """The mesh ``("replicate", "shard")`` of ``fully_shard``: sharded within a part, alike in all parts.

        A collective of all ranks of the job. Raises UsageError when the parts differ in size.
        """
        if len({len(part) for part in self.parts}) > 1:
            raise UsageError(f"no mesh can have parts of different sizes: {[list(part) for part in self.parts]}")
        return DeviceMesh(device_type, torch.tensor(self.parts), mesh_dim_names=("replicate", "shard"))


def replica_groups(
    group: dist.ProcessGroup | None = None, copies: int = 2, timeout: timedelta = timedelta(minutes=30)
) -> ReplicaGroup:
    """Split a data-parallel group into ``copies`` parts, each of which can hold all of a sharded optimizer's state.

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
    # Made by the part's ranks alone: several groups, dense and expert ones, may be split one after the other.
    made = dist.new_group(list(mine), timeout=timeout, use_local_synchronization=True)
    host = made
    if "gloo" not in dist.get_backend(made):
        host = dist.new_group(list(mine), timeout=timeout, backend="gloo", use_local_synchronization=True)
    _over[mine] = parent
    return ReplicaGroup(made, host, mine, tuple(parts))


def data_parallel_ranks() -> dict[int, tuple[int, ...]]:
    """By ``id`` of a parameter: the ranks that DistributedDataParallel keeps alike, unless a hook may not.

    Found among all objects of this process, because a state usually names the module that is wrapped, which knows
    nothing of that. Takes some 20 ms.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return {}
    found = [thing for thing in gc.get_objects() if issubclass(type(thing), DistributedDataParallel)]
    return {
        id(parameter): ranks
        for module in found
        if all(map(_keeps_alike, module._comm_hooks))
        for ranks in [tuple(sorted(dist.get_process_group_ranks(module.process_group)))]
        for parameter in module._module_parameters  # those that it was made with
    }


def _keeps_alike(hook: tuple[Any, Any]) -> bool:
    """Whether a hook in the place of DDP's averaging leaves all ranks with the same gradients, as it should; torch's
    own local SGD lets them drift apart for some steps."""
    return "post_localSGD" not in str(getattr(hook[0], "__module__", ""))


def ranks_with_copies(
    state: Mapping[str, Any], parameters: Mapping[int, tuple[int, ...]]
) -> dict[int, tuple[tuple[int, ...], tuple[int, ...]]]:
    """By ``id`` of a tensor that doesn't tell it of itself: (all ranks that hold the same, ranks of which some do).

    ``parameters``, which are those of DistributedDataParallel, and what optimizers keep of any that several ranks hold.
    """
    found = {key: (ranks, ranks) for key, ranks in parameters.items()}
    for entry in state.values():
        if isinstance(entry, ZeroState):
            part = parent_ranks(entry.optimizer.process_group)
            found |= {id(tensor): ((), part) for kept in entry.state.values() for tensor in kept.values()}
        elif isinstance(entry, torch.optim.Optimizer):
            trained = [p for group in entry.param_groups for p in group["params"] if p.requires_grad]
            all_kept = all(p in entry.state for p in trained)  # else ranks may share out the updates
            for parameter, kept in entry.state.items():
                ranks = parameters.get(id(parameter), ()) if all_kept else ()
                for tensor in kept.values() if isinstance(kept, dict) else ():
                    if ranks or (isinstance(tensor, torch.Tensor) and not tensor.dim()):
                        found[id(tensor)] = (ranks, ranks) if ranks else _of(parameter)
    return found


def _of(parameter: torch.Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Who keeps the same count of a sharded parameter's updates: whoever holds the same shard of it, and more."""
    ranks = local_parts(parameter, "").ranks if is_dtensor(parameter) else ()
    return ranks, ranks


def parent_ranks(group: dist.ProcessGroup) -> tuple[int, ...]:
    """The ranks among which there are copies of what ``group``, a part, shards; nobody if it isn't a part."""
    return _over.get(tuple(dist.get_process_group_ranks(group)), ())
