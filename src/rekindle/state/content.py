"""Lists what the entries of a state hold: live tensors by the names of the bare model, without any collective."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from rekindle.state.flat import FlatRun, flat_modules, flat_runs, is_flat, tied_names
from rekindle.state.names import Names, canonical_names, strip_wrappings
from rekindle.state.numbers import pack_numbers
from rekindle.state.parts import FlatPart, is_leaf
from rekindle.state.placed import PlacedState
from rekindle.state.zero import ZeroState, number_parameters

__all__ = ["StateContent", "is_plain_optimizer", "with_extra_state"]


class StateContent:
    """Lists the content of all entries of one state. Valid until a module or an optimizer gets other parameters.

    For one thread at a time.
    """

    def __init__(self, state: dict[str, Any]) -> None:
        for module in state.values():
            if isinstance(module, torch.nn.Module) and not is_flat(module) and _has_hooks(module):
                module.state_dict(keep_vars=True)  # fully_shard then restores the parameters that optimizers know
        self._names = Names(state)
        self._flat: dict[int, list[FlatRun]] = {}
        """Maps the id of a flat tensor to the parameters in it. With ``use_orig_params`` each parameter is one."""
        self._modules = {id(module): self._flatten(module) for module in state.values() if is_flat(module)}

    def _flatten(self, module: torch.nn.Module) -> list[tuple[str, FlatPart]]:
        found = []
        for prefix, part in flat_modules(module):
            dot = strip_wrappings(prefix + ".", []) if prefix else ""
            base, runs = flat_runs(part, dot)
            flat = part._handle.flat_param
            self._flat[id(flat)] = runs
            for number, run in enumerate(runs):
                counter = flat
                if part._handle._use_orig_params:
                    counter = flat._params[number]
                    view = FlatRun(run.name, run.shape, 0, run.first, run.last, run.ranks)
                    self._flat[id(counter)] = [view]
                found.append((run.name, run.of(base, counter)))
            known = dict(found)
            found += [(dot + name, known[dot + first]) for name, first in tied_names(flat)]
        return found

    def of(self, entry: Any) -> Any:
        """Returns the content of an entry: nested, with live tensors and values as leaves."""
        if isinstance(entry, torch.nn.Module):
            return self._module(entry)
        saved = entry.state_dict()
        if isinstance(entry, PlacedState):
            return saved
        if isinstance(entry, ZeroState) or is_plain_optimizer(entry, saved):
            return self._optimizer(entry, saved)
        return pack_numbers(saved)

    def keys(self, module: torch.nn.Module | PlacedState) -> dict[str, str]:
        """Maps the keys that the module's own ``load_state_dict()`` expects to the bare model's names.

        Leaves out flattened parameters, and those of a PlacedState, which are filled in place.
        """
        if isinstance(module, PlacedState):
            return {key: key for key, leaf in self.of(module).items() if not is_leaf(leaf)}
        if id(module) in self._modules:
            return {key: key for key, leaf in self._module(module).items() if not isinstance(leaf, FlatPart)}
        names = canonical_names(module)
        return {key: names.get(key, key) for key in module.state_dict(keep_vars=True)}

    def _module(self, module: torch.nn.Module) -> dict[str, Any]:
        names = canonical_names(module)
        if id(module) not in self._modules:
            return {names.get(key, key): value for key, value in module.state_dict(keep_vars=True).items()}
        found: dict[str, Any] = dict(self._modules[id(module)])
        hidden = [(name, key) for name, m in module.named_modules() for key in m._non_persistent_buffers_set]
        passed_over = {f"{name}.{key}" if name else key for name, key in hidden}
        for key, tensor in [
            *module.named_parameters(remove_duplicate=False),
            *module.named_buffers(remove_duplicate=False),
        ]:
            if id(tensor) not in self._flat and key not in passed_over:
                found[names[key]] = tensor
        return found | {key: part.get_extra_state() for key, part in with_extra_state(module)}

    # -- optimizers ---------------------------------------------------------------------------------------------

    def names(self, entry: Any) -> dict[int, list[Any]]:
        """Maps the id of each of an optimizer's parameters to its names: several for a flat tensor."""
        every = number_parameters(entry.param_groups)
        single = self._names.of(every)
        return {
            id(p): [run.name for run in self._flat[id(p)]] if id(p) in self._flat else [single[number]]
            for number, p in every.items()
        }

    def runs(self, parameter: torch.Tensor) -> list[FlatRun] | None:
        """Returns the parameters in a flat tensor; None for any other tensor."""
        return self._flat.get(id(parameter))

    def _optimizer(self, entry: Any, saved: dict[str, Any]) -> dict[str, Any]:
        names = self.names(entry)
        every = number_parameters(entry.param_groups)
        state: dict[Any, Any] = {}
        for key, kept in saved["state"].items():
            if not isinstance(key, int):
                state[key] = kept
                continue
            parameter = every[key]
            for number, name in enumerate(names[id(parameter)]):
                state[name] = self._kept(parameter, kept, number)
        groups = []
        for group, live in zip(saved["param_groups"], entry.param_groups, strict=True):
            params = [name for p in live["params"] for name in names[id(p)]]
            groups.append({**group, "params": params})
        return {**saved, "state": state, "param_groups": groups}

    def _kept(self, parameter: torch.Tensor, kept: Any, number: int) -> Any:
        runs = self._flat.get(id(parameter))
        if runs is None or not isinstance(kept, dict):
            return kept
        return {
            key: runs[number].of(value, value)
            if isinstance(value, torch.Tensor) and value.dim() and value.shape == parameter.shape
            else value
            for key, value in kept.items()
        }


def _has_hooks(module: torch.nn.Module) -> bool:
    return any(part._state_dict_pre_hooks for part in module.modules())


def with_extra_state(module: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """Yields modules with extra state, and its key in ``state_dict()``."""
    for name, part in module.named_modules():
        if type(part).get_extra_state is not torch.nn.Module.get_extra_state:
            yield strip_wrappings(f"{name}._extra_state" if name else "_extra_state", []), part


def is_plain_optimizer(entry: Any, saved: Any) -> bool:
    """True if ``saved`` has the form of torch's optimizers: state and parameters by number."""
    return (
        isinstance(getattr(entry, "param_groups", None), list)
        and isinstance(saved, dict)
        and isinstance(saved.get("state"), dict)
        and isinstance(saved.get("param_groups"), list)
        and all(isinstance(group, dict) and "params" in group for group in saved["param_groups"])
        and len(saved["param_groups"]) == len(entry.param_groups)
    )
