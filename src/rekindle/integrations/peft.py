"""Leaves the frozen base of a PEFT model out of the state, as PEFT's own checkpoints do."""

from __future__ import annotations

from typing import Any

import torch

from rekindle.save.capture import unwrap

__all__ = ["without_frozen_base"]


def without_frozen_base(model: Any) -> Any:
    """Returns the trained parameters and the buffers of a PEFT model as a module; any other model as it is.

    The script loads the base from where it came. In the state it would be copied anew at each step, since no optimizer
    tells when it changes; and where it is quantized it could not be saved at all.
    """
    bare = unwrap(model)
    if not hasattr(bare, "peft_config"):
        return model
    part = torch.nn.Module()
    saved = bare.state_dict(keep_vars=True)
    for name, parameter in bare.named_parameters():
        if parameter.requires_grad:
            part.register_parameter(name.replace(".", "/"), parameter)
    for name, buffer in bare.named_buffers():
        if name in saved:
            part.register_buffer(name.replace(".", "/"), buffer)
    return part
