"""Names tensors as in the bare model, so that a checkpoint doesn't depend on how the model was wrapped.

The names are those of ``torch.distributed.checkpoint.state_dict``.
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
    """Maps the module's own name of each parameter and buffer to the name without any wrapping."""
    inner = [f"{name}." if name else "" for name, m in module.named_modules() if isinstance(m, DistributedDataParallel)]
    found = {}
    for named in (module.named_parameters, module.named_buffers):
        for key, _ in named(remove_duplicate=False):
            found[key] = strip_wrappings(key, inner)
    count = Counter(found.values())  # a submodule may have the name of a wrapping; then two names could become one
    return {key: name if count[name] == 1 else key for key, name in found.items()}


def strip_wrappings(key: str, inner: list[str]) -> str:
    """Returns ``key`` without wrappings.

    ``inner`` has the prefixes of DistributedDataParallel modules, whose wrapped module is called ``module``.
    """
    for prefix in sorted(inner, key=len, reverse=True):
        if key.startswith(f"{prefix}module."):
            key = prefix + key[len(f"{prefix}module.") :]
    *parts, last = key.split(".")
    return ".".join([*(part for part in parts if part not in _WRAPPINGS), last])


class Names:
    """Names the parameters of a state's modules for its optimizers. Valid until a parameter is replaced."""

    def __init__(self, state: Mapping[str, Any]) -> None:
        self._of: dict[int, tuple[str, str]] = {}
        for entry, module in state.items():
            if isinstance(module, torch.nn.Module):
                names = canonical_names(module)
                for key, parameter in module.named_parameters(remove_duplicate=False):
                    self._of.setdefault(id(parameter), (entry, names[key]))

    def of(self, parameters: Mapping[int, torch.Tensor]) -> dict[int, Any]:
        """Maps the numbers of an optimizer's parameters to their names.

        A name begins with that of the module's entry if the optimizer has parameters of several. A parameter without a
        unique name in the state keeps its number.
        """
        found = {number: self._of.get(id(parameter)) for number, parameter in parameters.items()}
        several = len({entry[0] for entry in found.values() if entry is not None}) > 1
        names: dict[int, Any] = {}
        for number, entry in found.items():
            names[number] = number if entry is None else ".".join(entry) if several else entry[1]
        count = Counter(names.values())
        return {number: name if count[name] == 1 else number for number, name in names.items()}
