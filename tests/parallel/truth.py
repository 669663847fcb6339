"""What a job holds, as if nothing were sharded: gathered with torch's own means, and compared bit for bit."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from tests.parallel.kinds import Part

__all__ = ["Truth", "differences", "gather"]

Truth = dict[str, Any]
"""Tensors by ``model.NAME`` and ``optimizer.state.NAME.KEY``; settings by ``optimizer.group.NAME``; ``scheduler``."""

_SETTINGS = ("lr", "initial_lr", "weight_decay", "betas", "eps", "amsgrad", "maximize")


def gather(part: Part) -> Truth:
    """The whole of a job's state; empty on all ranks but the first. A collective.

    What several ranks hold alike must be alike: raises AssertionError where it isn't.
    """
    mine = _flat(part) if part.kind.startswith("fsdp1") else _local(part)
    mine["scheduler"] = {k: v for k, v in part.scheduler.state_dict().items() if k != "lr_lambdas"}
    every: list[Truth] = [mine]
    if dist.is_initialized():
        found = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
        dist.gather_object(mine, found)
        every = found if found is not None else []  # type: ignore[assignment]
    whole: Truth = {}
    for one in every:
        torn = differences({k: whole[k] for k in one if k in whole}, {k: one[k] for k in one if k in whole})
        assert not torn, f"ranks do not agree: {torn}"
        whole |= one
    return whole


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    from torch.distributed.tensor import DTensor

    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().cpu().clone()


def _local(part: Part) -> Truth:
    """What this rank can tell, its parts of tensors completed by the other ranks that hold them."""
    found: Truth = {}
    names = {}
    for name, p in part.bare.named_parameters(remove_duplicate=False):
        found[f"model.{name}"] = _whole(p)
        names.setdefault(p, name)
    for name, buffer in part.bare.named_buffers():
        found[f"model.{name}"] = _whole(buffer)
    inner = part.optimizer.optim if part.kind == "zero1" else part.optimizer
    for p, kept in inner.state.items():
        found |= {f"optimizer.state.{names[p]}.{key}": _whole(value) for key, value in kept.items()}
    for group in part.optimizer.param_groups:
        for p in group["params"]:
            found[f"optimizer.group.{names[p]}"] = {key: group[key] for key in _SETTINGS}
    return found


def _flat(part: Part) -> Truth:
    """The same of a FullyShardedDataParallel model, which keeps parameters flattened and cut anywhere."""
    from torch.distributed.fsdp import FullOptimStateDictConfig, FullStateDictConfig, StateDictType
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

    found: Truth = {}
    with FSDP.summon_full_params(part.model, writeback=False):
        for name, p in part.model.named_parameters(remove_duplicate=False):
            found[f"model.{_bare(name)}"] = p.detach().clone()
    for name, buffer in part.model.named_buffers():
        found[f"model.{_bare(name)}"] = buffer.detach().clone()
    if part.kind == "fsdp1-orig":
        return found | _cut(part, found)
    configs = FullStateDictConfig(rank0_only=False), FullOptimStateDictConfig(rank0_only=False)
    with FSDP.state_dict_type(part.model, StateDictType.FULL_STATE_DICT, *configs):
        saved = FSDP.optim_state_dict(part.model, part.optimizer)
    for name, kept in saved["state"].items():
        found |= {f"optimizer.state.{name}.{key}": value.clone() for key, value in kept.items()}
    for group in saved["param_groups"]:
        for name in group["params"]:
            found[f"optimizer.group.{name}"] = {key: group[key] for key in _SETTINGS}
    return found


def _cut(part: Part, found: Truth) -> Truth:
    """The optimizer's, where each rank has a run of each parameter's elements: laid end to end.

    By hand, since ``FSDP.optim_state_dict()`` of torch 2.13 gives one tensor for all of a parameter's on the CPU.
    """
    names = {p: _bare(name) for name, p in part.model.named_parameters()}
    mine = {names[p]: {key: value.clone() for key, value in kept.items()} for p, kept in part.optimizer.state.items()}
    every: list[dict[str, dict[str, torch.Tensor]]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(every, mine)
    whole: Truth = {}
    for name, key in sorted({(name, key) for one in every for name, kept in one.items() for key in kept}):
        parts = [one[name][key] for one in every if name in one]
        ended = parts[0] if not parts[0].dim() else torch.cat(parts).view(found[f"model.{name}"].shape)
        whole[f"optimizer.state.{name}.{key}"] = ended
    for group in part.optimizer.param_groups:
        for p in group["params"]:
            whole[f"optimizer.group.{names[p]}"] = {key: group[key] for key in _SETTINGS}
    return whole


def _bare(name: str) -> str:
    return name.replace("_fsdp_wrapped_module.", "")


def differences(want: Truth, have: Truth) -> list[str]:
    """What differs, by name and in which way; nothing where every bit is the same."""
    found = [f"{name}: is missing" for name in want.keys() - have.keys()]
    found += [f"{name}: is too much" for name in have.keys() - want.keys()]
    for name in want.keys() & have.keys():
        a, b = want[name], have[name]
        if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
            if a != b or isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor):
                found.append(f"{name}: {a!r:.200} is now {b!r:.200}")
        elif (a.dtype, a.shape) != (b.dtype, b.shape):
            found.append(f"{name}: {a.dtype} {list(a.shape)} is now {b.dtype} {list(b.shape)}")
        elif not torch.equal(_bits(a), _bits(b)):
            wrong = int((_bits(a) != _bits(b)).sum())
            found.append(f"{name}: {wrong} of {a.nbytes} bytes differ")
    return sorted(found)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)
