"""Does a checkpoint fit the live state, and from filled tensors back into live objects."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from rekindle.errors import StateMismatchError, UsageError
from rekindle.snapshot.documents import Receipt
from rekindle.state.codec import has_pickle
from rekindle.state.fill import Destinations
from rekindle.state.rng import RngState
from rekindle.state.tree import assemble, entries

__all__ = ["check", "load"]


def check(state: Mapping[str, Any], receipt: Receipt, allow_pickle: bool) -> None:
    """Raise unless the checkpoint can be loaded into the live state. Changes nothing.

    StateMismatchError when it doesn't fit; modules are compared tensor by tensor, because torch would copy what fits
    before it complains about the rest. UsageError when it holds pickles and those weren't asked for.
    """
    if not allow_pickle and has_pickle(receipt.values):
        raise UsageError(
            f"the checkpoint of step {receipt.stamp.step} holds pickled values; loading those runs code: "
            "restore(allow_pickle=True) allows it"
        )
    saved = entries(receipt.structure)
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
            _check_module(name, entry, entries(saved[name]), chunks)
        elif isinstance(entry, torch.optim.Optimizer):
            _check_optimizer(name, entry, entries(saved[name]))


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


def _check_optimizer(name: str, optimizer: torch.optim.Optimizer, saved: Mapping[str, Any]) -> None:
    if "param_groups" not in optimizer.state_dict():
        return  # an optimizer with a state of its own kind: its load_state_dict() will judge
    ours = [len(group["params"]) for group in optimizer.param_groups]
    theirs = [len(entries(group).get("params", ())) for group in saved.get("param_groups", ())]
    if ours != theirs:
        raise StateMismatchError(f"{name}: parameters per group are {ours}, in the checkpoint {theirs}")


def load(state: Mapping[str, Any], receipt: Receipt, filled: Destinations, allow_pickle: bool) -> None:
    """Give the live objects what has been put, verified, into ``filled``, and all values.

    Each entry's ``load_state_dict()`` is called, so that hooks and classes with a mind of their own work as ever. It is
    given live tensors where those have been filled in place: torch sees that there is nothing left to copy. Random
    generators come last, so nothing that runs while loading draws from them.
    """
    filled.settle()
    saved = entries(receipt.structure)
    copies: dict[str, torch.Tensor] = {}
    trees = {}

    def own(entry: str, name: str) -> torch.Tensor:
        if filled.live.get(name, entry) == entry:
            return filled.tensors[name]
        if name not in copies:  # once per name, so that tied tensors come back tied
            copies[name] = filled.tensors[name].detach().clone()
        return copies[name]

    for name, entry in state.items():
        if name not in saved:
            continue  # the generators, of a job that began without them
        live = entry.state_dict(keep_vars=True) if isinstance(entry, torch.nn.Module) else {}
        trees[name] = {
            # What load_state_dict() copies into a live tensor may be another entry's; what it might keep may not.
            key: assemble(
                node,
                receipt.values,
                filled.tensors.__getitem__ if isinstance(live.get(key), torch.Tensor) else partial(own, name),
                allow_pickle,
            )
            for key, node in entries(saved[name]).items()
        }
        if live:
            # Versions of the modules' own formats; torch keeps them in an attribute, and we require the same ones.
            trees[name] = OrderedDict(trees[name])
            setattr(trees[name], "_metadata", getattr(live, "_metadata", None))  # noqa: B010
    for name in sorted(trees, key=lambda name: isinstance(state[name], RngState)):
        try:
            state[name].load_state_dict(trees[name])
        except Exception as error:
            raise StateMismatchError(f"{name}: load_state_dict() refused the checkpoint: {error}") from error
        if isinstance(state[name], torch.optim.Optimizer):
            _keep_dtypes(state[name], trees[name])


def _keep_dtypes(optimizer: torch.optim.Optimizer, tree: Mapping[str, Any]) -> None:
    """Undo a cast: torch gives optimizer state the parameter's dtype, which loses bits of float32 state of bfloat16."""
    if "state" not in tree or "param_groups" not in tree:
        return
    for live, saved in zip(optimizer.param_groups, tree["param_groups"], strict=True):
        for parameter, number in zip(live["params"], saved["params"], strict=True):
            if number in tree["state"]:
                optimizer.state[parameter] = _uncast(optimizer.state[parameter], tree["state"][number])


def _uncast(live: Any, saved: Any) -> Any:
    """``live``, with each tensor of another dtype than the saved one replaced by that, on the live one's device."""
    if isinstance(live, torch.Tensor) and isinstance(saved, torch.Tensor):
        return live if live.dtype == saved.dtype else saved.to(live.device)
    if isinstance(live, dict):
        return {key: _uncast(value, saved.get(key)) for key, value in live.items()}
    if type(live) in (list, tuple):
        return type(live)(_uncast(value, other) for value, other in zip(live, saved, strict=True))
    return live
