"""From a verified shard back into live state."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch

from rekindle.errors import RekindleError, StateMismatchError
from rekindle.snapshot.documents import Receipt
from rekindle.state.rng import RngState
from rekindle.state.tree import assemble

__all__ = ["check", "load"]


def check(state: Mapping[str, Any], receipt: Receipt) -> None:
    """Raise StateMismatchError unless the checkpoint fits the live state. Changes nothing.

    Modules are compared tensor by tensor, because torch would copy what fits before it complains about the rest.
    """
    saved = receipt.structure
    missing = [name for name in state if name not in saved and not isinstance(state[name], RngState)]
    surplus = [name for name in saved if name not in state and name != "rng"]
    if missing or surplus:
        raise StateMismatchError(
            f"the checkpoint of step {receipt.stamp.step} "
            + " and ".join(
                [f"has no {', '.join(map(repr, missing))}"] * bool(missing)
                + [f"has {', '.join(map(repr, surplus))}, which the state lacks"] * bool(surplus)
            )
        )
    chunks = {chunk.name: chunk for chunk in receipt.layout.chunks}
    for name, entry in state.items():
        if isinstance(entry, torch.nn.Module):
            _check_module(name, entry, saved[name], chunks)
        elif isinstance(entry, torch.optim.Optimizer):
            _check_optimizer(name, entry, receipt)


def _check_module(name: str, module: torch.nn.Module, saved: Any, chunks: Mapping[str, Any]) -> None:
    live = {k: v for k, v in module.state_dict(keep_vars=True).items() if isinstance(v, torch.Tensor)}
    there = {k: chunks[node["$tensor"]] for k, node in saved.items() if isinstance(node, dict) and "$tensor" in node}
    problems = [f"{name}.{key}: only in the live state" for key in live if key not in saved]
    problems += [f"{name}.{key}: only in the checkpoint" for key in there if key not in live]
    for key in live.keys() & there.keys():
        ours = (tuple(live[key].shape), str(live[key].dtype).removeprefix("torch."))
        theirs = (there[key].sizes, there[key].dtype)
        if ours != theirs:
            problems.append(f"{name}.{key}: live {ours[1]}{list(ours[0])}, saved {theirs[1]}{list(theirs[0])}")
    if problems:
        more = f" (and {len(problems) - 5} more)" if len(problems) > 5 else ""
        raise StateMismatchError("; ".join(sorted(problems)[:5]) + more)


def _check_optimizer(name: str, optimizer: torch.optim.Optimizer, receipt: Receipt) -> None:
    ours = [len(group["params"]) for group in optimizer.param_groups]
    try:
        theirs = [len(group["params"]) for group in receipt.structure[name]["param_groups"]]
    except (KeyError, TypeError):
        return  # an optimizer with a state of its own kind; its load_state_dict() will judge
    if ours != theirs:
        raise StateMismatchError(f"{name}: parameters per group are {ours}, in the checkpoint {theirs}")


def load(state: Mapping[str, Any], receipt: Receipt, shard: memoryview, allow_pickle: bool) -> None:
    """Put the shard's state into the live objects. ``shard`` is the whole file, verified.

    Parameters and buffers are copied straight from ``shard``; everything else gets tensors of its own. Random
    generators come last, so nothing that runs while loading draws from them.
    """
    chunks = {chunk.name: chunk for chunk in receipt.layout.chunks}
    copies: dict[str, torch.Tensor] = {}

    def view(name: str) -> torch.Tensor:
        chunk = chunks[name]
        dtype = getattr(torch, chunk.dtype)
        if not chunk.nbytes:
            return torch.empty(chunk.sizes, dtype=dtype)
        count = chunk.nbytes // dtype.itemsize
        return torch.frombuffer(shard, dtype=dtype, count=count, offset=receipt.header_bytes + chunk.start).view(
            chunk.sizes
        )

    def own(name: str) -> torch.Tensor:
        if name not in copies:  # once per name, so that tied tensors come back tied
            copies[name] = view(name).clone()
        return copies[name]

    for name, entry in sorted(state.items(), key=lambda item: isinstance(item[1], RngState)):
        if name not in receipt.structure:
            continue  # the generators, of a job that began without them
        try:
            if isinstance(entry, torch.nn.Module):
                _load_module(entry, receipt, name, view, own, allow_pickle)
            else:
                tree = assemble(receipt.structure[name], receipt.values, own, allow_pickle)
                entry.load_state_dict(tree)
                if isinstance(entry, torch.optim.Optimizer):
                    _keep_dtypes(entry, tree)
        except RekindleError:
            raise
        except Exception as error:
            raise StateMismatchError(f"{name}: load_state_dict() refused the checkpoint: {error}") from error


def _load_module(module: torch.nn.Module, receipt: Receipt, name: str, view: Any, own: Any, allow_pickle: bool) -> None:
    live = module.state_dict(keep_vars=True)
    tree = {
        # What load_state_dict() copies into a live tensor needs no copy of its own; what it hands to
        # set_extra_state() might be kept.
        key: assemble(node, receipt.values, view if isinstance(live.get(key), torch.Tensor) else own, allow_pickle)
        for key, node in receipt.structure[name].items()
    }
    loaded = OrderedDict(tree)
    # Versions of the modules' own formats; torch keeps them in an attribute, and we require them to be the same.
    setattr(loaded, "_metadata", getattr(live, "_metadata", None))  # noqa: B010
    module.load_state_dict(loaded)


def _keep_dtypes(optimizer: torch.optim.Optimizer, tree: Any) -> None:
    """Undo a cast: torch gives optimizer state the parameter's dtype, which loses bits of float32 state of bfloat16."""
    if not isinstance(tree, dict) or "state" not in tree or "param_groups" not in tree:
        return
    for live, saved in zip(optimizer.param_groups, tree["param_groups"], strict=True):
        for parameter, number in zip(live["params"], saved["params"], strict=True):
            for key, value in tree["state"].get(number, {}).items():
                current = optimizer.state[parameter].get(key)
                both = isinstance(value, torch.Tensor) and isinstance(current, torch.Tensor)
                if both and current.dtype != value.dtype:
                    optimizer.state[parameter][key] = value.to(current.device)
