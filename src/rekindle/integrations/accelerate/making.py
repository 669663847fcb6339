"""Makes a Checkpointer whose state is what an Accelerator has prepared. Written for accelerate 1.15."""

from __future__ import annotations

import logging
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

log = logging.getLogger("rekindle")


def checkpointer(accelerator: Any, root: str | os.PathLike[str], **settings: Any) -> rekindle.Checkpointer:
    """Makes a Checkpointer of all models, optimizers, schedulers and loaders that ``accelerator`` has prepared.

    What ``register_for_checkpointing`` was given belongs to it too. To be called on all ranks, after the last of both.
    After ``restore()`` a loader leaves out, once, the batches that its epoch had before the restored step, and its
    ``iteration`` is that epoch: loop by ``for epoch in range(loader.iteration, epochs)``. Call ``step(n)`` where
    ``accelerator.sync_gradients`` is true.

    Its ``restore()``, ``step()`` and ``save()`` raise UsageError when something was prepared or registered since, and
    the latter two where ``accumulate()`` holds gradients back.

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
        **_prepared(accelerator),
        "model": [without_frozen_base(model) for model in accelerator._models],
        "loader": [LoaderPosition(loader) for loader in accelerator._dataloaders],
    }.items():
        state |= {f"{name}_{number}" if number else name: entry for number, entry in enumerate(entries)}
    if accelerator.scaler is not None:
        state["scaler"] = accelerator.scaler
    state["accelerator"] = _BatchCount(accelerator)
    return _Checkpointer(accelerator, root, state, **settings)


def _prepared(accelerator: Any) -> dict[str, list[Any]]:
    """Returns what ``accelerator`` has been given until now, by the names in the state."""
    return {
        "model": accelerator._models,
        "optimizer": accelerator._optimizers,
        "scheduler": accelerator._schedulers,
        "loader": accelerator._dataloaders,
        "custom": accelerator._custom_objects,
    }


class _Checkpointer(rekindle.Checkpointer):
    """Refuses steps that would come back without a part: the state is what had been prepared when this was made."""

    def __init__(self, accelerator: Any, root: str | os.PathLike[str], state: dict[str, Any], **settings: Any) -> None:
        self._accelerator = accelerator
        self._saved = {id(one): one for prepared in _prepared(accelerator).values() for one in prepared}
        """Objects in the state by id. They are held, so that no other one gets the id of one that is gone."""
        super().__init__(root, state, **settings)

    def restore(self, *args: Any, **options: Any) -> int:
        self._check_prepared()
        return super().restore(*args, **options)

    def step(self, *args: Any, **options: Any) -> None:
        self._check_gradients("step")
        super().step(*args, **options)

    def save(self, *args: Any, **options: Any) -> None:
        self._check_gradients("save")
        super().save(*args, **options)

    def _check_gradients(self, call: str) -> None:
        self._check_prepared()
        if not self._accelerator.sync_gradients:
            raise UsageError(
                f"{call}() where accumulate() holds gradients back, which are not saved: a restart would go on without "
                f"them. Call {call}() only if accelerator.sync_gradients, where the optimizer has made its update"
            )

    def _check_prepared(self) -> None:
        found = _prepared(self._accelerator)
        late = {name: [one for one in prepared if id(one) not in self._saved] for name, prepared in found.items()}
        for loader in late.pop("loader"):
            self._saved[id(loader)] = loader  # it is told once
            log.warning(
                "a %s was prepared after checkpointer(), so its place is not saved: after a restart it begins its "
                "epoch again. That is right for evaluation; for training call checkpointer() after prepare()",
                type(loader).__name__,
            )
        told = [f"{name} ({type(one).__name__})" for name, prepared in late.items() for one in prepared]
        if told:
            raise UsageError(
                f"prepared or registered after checkpointer(), so not saved, and lost at a restart: {', '.join(told)}. "
                "Call checkpointer() after the last prepare() and register_for_checkpointing()"
            )


class _BatchCount:
    """Entry of the state: batches that ``accumulate()`` has counted, by which it knows when to synchronize."""

    def __init__(self, accelerator: Any) -> None:
        self._accelerator = accelerator

    def state_dict(self) -> dict[str, Any]:
        return {"step": self._accelerator.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._accelerator.step = state["step"]
