"""Makes a Checkpointer whose state is what an Accelerator has prepared. Written for accelerate 1.15."""

from __future__ import annotations

import os
from typing import Any

import rekindle
from rekindle.errors import UsageError
from rekindle.integrations.accelerate.loaders import LoaderPosition
from rekindle.integrations.peft import without_frozen_base
from rekindle.integrations.versions import warn_if_untested

__all__ = ["checkpointer"]

_TESTED = ("1.15", "1.15")
"""First and last series of accelerate that the tests have run with."""
_REFUSED = ("DEEPSPEED", "MEGATRON_LM")
"""Kinds of training in which another library keeps weights and optimizer."""


def checkpointer(accelerator: Any, root: str | os.PathLike[str], **settings: Any) -> rekindle.Checkpointer:
    """Makes a Checkpointer of all models, optimizers, schedulers and loaders that ``accelerator`` has prepared.

    What ``register_for_checkpointing`` was given belongs to it too. To be called on all ranks, after ``prepare()``.
    After ``restore()`` a loader leaves out, once, the batches that its epoch had before the restored step, and its
    ``iteration`` is that epoch: loop by ``for epoch in range(loader.iteration, epochs)``. Call ``step(n)`` where
    ``accelerator.sync_gradients`` is true.

    Args:
        accelerator: an ``accelerate.Accelerator``.
        root: directory or URL of the checkpoints.
        settings: other arguments of ``rekindle.Checkpointer``.

    Raises:
        UsageError: nothing has been prepared, or DeepSpeed or Megatron-LM train; or as ``Checkpointer`` does.
    """
    kind = getattr(accelerator.distributed_type, "value", None)
    if kind in _REFUSED:
        raise UsageError(f"this Accelerator trains by {kind}, which keeps weights and optimizer itself")
    if not accelerator._models:
        raise UsageError("this Accelerator has prepared no model: call prepare() first")
    warn_if_untested("accelerate", *_TESTED)
    state: dict[str, Any] = {}
    for name, entries in {
        "model": [without_frozen_base(model) for model in accelerator._models],
        "optimizer": accelerator._optimizers,
        "scheduler": accelerator._schedulers,
        "loader": [LoaderPosition(loader) for loader in accelerator._dataloaders],
        "custom": accelerator._custom_objects,
    }.items():
        state |= {f"{name}_{number}" if number else name: entry for number, entry in enumerate(entries)}
    if accelerator.scaler is not None:
        state["scaler"] = accelerator.scaler
    state["accelerator"] = _BatchCount(accelerator)
    return rekindle.Checkpointer(root, state, **settings)


class _BatchCount:
    """Entry of the state: batches that ``accumulate()`` has counted, by which it knows when to synchronize."""

    def __init__(self, accelerator: Any) -> None:
        self._accelerator = accelerator

    def state_dict(self) -> dict[str, Any]:
        return {"step": self._accelerator.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._accelerator.step = state["step"]
