"""What tensors are called: as in the bare model, so that a checkpoint doesn't depend on how the model was wrapped.

The same names as those of ``torch.distributed.checkpoint.state_dict``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

__all__ = ["Names", "canonical_names", "strip_wrappings"]

_WRAPPINGS = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")


def canonical_names(module: torch.nn.Module) -> dict[str, str]:
    """Of each parameter and buffer of ``module``, as it calls them itself: the name without any wrapping."""
    inner = [f"{name}." if name else "" for name, m in module.named_modules() if isinstance(m, DistributedDataParallel)]
    found = {}
    for named in (module.named_parameters, module.named_buffers):
        for key, _ in named(remove_duplicate=False):
            found[key] = strip_wrappings(key, inner)
    count = Counter(found.values())  # a part may be called as a wrapping is, and have a namesake outside
    return {key: name if count[name] == 1 else key for key, name in found.items()}


def strip_wrappings(key: str, inner: list[str]) -> str:
    """``inner``: prefixes of modules that are DistributedDataParallel, whose own is called ``module``."""
    for prefix in sorted(inner, key=len, reverse=True):
        if key.startswith(f"{prefix}module."):
            key = prefix + key[len(f"{prefix}module.") :]
    *parts, last = key.split(".")
    return ".".join([*(part for part in parts if part not in _WRAPPINGS), last])


class Names:
    """Of the parameters of a state's modules, for its optimizers. Good until a parameter is replaced."""

    def __init__(self, state: Mapping[str, Any]) -> None:
        self._of: dict[int, tuple[str, str]] = {}
        for entry, module in state.items():
            if isinstance(module, torch.nn.Module):
                names = canonical_names(module)
                for key, parameter in module.named_parameters(remove_duplicate=False):
                    self._of.setdefault(id(parameter), (entry, names[key]))

    def of(self, parameters: Mapping[int, torch.Tensor]) -> dict[int, Any]:
        """What an optimizer calls its parameters, by their numbers: by name, with that of its module if there are
        several of those; by the number itself where no module of the state has the parameter, or two have that name."""
        found = {number: self._of.get(id(parameter)) for number, parameter in parameters.items()}
        several = len({entry[0] for entry in found.values() if entry is not None}) > 1
        names: dict[int, Any] = {}
        for number, entry in found.items():
            names[number] = number if entry is None else ".".join(entry) if several else entry[1]
        count = Counter(names.values())
        return {number: name if count[name] == 1 else number for number, name in names.items()}
