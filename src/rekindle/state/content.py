"""What the entries of a state hold, by the names of the bare model, with live tensors; without a collective."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from rekindle.state.flat import FlatRun, flat_modules, flat_runs, is_flat, tied_names
from rekindle.state.names import Names, canonical_names, strip_wrappings
from rekindle.state.numbers import pack_numbers
from rekindle.state.parts import FlatPart
from rekindle.state.zero import ZeroState, number_parameters

__all__ = ["StateContent", "is_plain_optimizer", "with_extra_state"]


class StateContent:
    """Of all entries of one state. Good until a module or an optimizer gets other parameters."""

    def __init__(self, state: dict[str, Any]) -> None:
        for module in state.values():
            if isinstance(module, torch.nn.Module) and not is_flat(module) and _has_hooks(module):
                module.state_dict(keep_vars=True)  # fully_shard then puts back the parameters that optimizers have
        self._names = Names(state)
        self._flat: dict[int, list[FlatRun]] = {}
        """By id of a tensor in which parameters lie flattened: these. With views, each parameter has its own."""
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
        if isinstance(entry, torch.nn.Module):
            return self._module(entry)
        saved = entry.state_dict()
        if isinstance(entry, ZeroState) or is_plain_optimizer(entry, saved):
            return self._optimizer(entry, saved)
        return pack_numbers(saved)

    def keys(self, module: torch.nn.Module) -> dict[str, str]:
        """The bare model's names, by what the module's own ``load_state_dict()`` is to be given them as.

        Without what lies in flattened parameters: that is filled where it is.
        """
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
        """By id of each of an optimizer's parameters: what it is called; several names where several are flattened."""
        every = number_parameters(entry.param_groups)
        single = self._names.of(every)
        return {
            id(p): [run.name for run in self._flat[id(p)]] if id(p) in self._flat else [single[number]]
            for number, p in every.items()
        }

    def runs(self, parameter: torch.Tensor) -> list[FlatRun] | None:
        """What lies in a parameter that is a flattened one."""
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
    """Modules inside that keep more than tensors, and what ``state_dict()`` calls that."""
    for name, part in module.named_modules():
        if type(part).get_extra_state is not torch.nn.Module.get_extra_state:
            yield strip_wrappings(f"{name}._extra_state" if name else "_extra_state", []), part


def is_plain_optimizer(entry: Any, saved: Any) -> bool:
    """Whether ``saved`` is what torch's optimizers give: state and parameters by number."""
    return (
        isinstance(getattr(entry, "param_groups", None), list)
        and isinstance(saved, dict)
        and isinstance(saved.get("state"), dict)
        and isinstance(saved.get("param_groups"), list)
        and all(isinstance(group, dict) and "params" in group for group in saved["param_groups"])
        and len(saved["param_groups"]) == len(entry.param_groups)
    )
