"""Attaches Rekindle to a Trainer that has been made, and refuses what would not come back as it was.

Written for transformers 5.18 to 5.24; the methods that it wraps are private ones of the Trainer.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping
from typing import Any, Literal

from rekindle.errors import UsageError
from rekindle.integrations.transformers.run import WRAPPED, Attachment
from rekindle.integrations.versions import warn_if_untested
from rekindle.settings import check_settings

__all__ = ["RekindleMixin", "attach"]

_TESTED = ("5.18", "5.24")
"""First and last series of transformers that the tests have run with."""
_REFUSED = {
    "enable_jit_checkpoint": "Rekindle secures the step under way at SIGTERM, and two can't own that signal",
    "auto_find_batch_size": "a run that goes on needs the batches that it had: set per_device_train_batch_size",
}


def attach(
    trainer: Any,
    root: str | os.PathLike[str],
    *,
    watchdog: bool | float | Literal["fast"] = True,
    **settings: Any,
) -> Attachment:
    """Lets every step of ``trainer.train()`` be secured, and each start go on behind the newest one.

    To be called on all ranks, once the trainer has been made, and before ``train()``. The trainer's own checkpoints go
    on as before. If one that ``resume_from_checkpoint`` names is newer than what ``root`` has, training goes on from
    that one.

    Args:
        trainer: a ``transformers.Trainer``, or one of a class derived from it.
        root: directory or URL of the checkpoints, as for ``rekindle.Checkpointer``. It holds one run.
        watchdog: as for ``Checkpointer.guard``.
        settings: keyword arguments for ``rekindle.Checkpointer``.

    Returns:
        An ``Attachment``, whose ``checkpointer`` is that of the newest ``train()``.

    Raises:
        UsageError: the trainer has been attached, trains already, has arguments that can't be had together with this,
            or is of a version that lacks what is needed; or a setting makes no sense.
    """
    check_settings(settings)
    _check(trainer)
    warn_if_untested("transformers", *_TESTED)
    return Attachment(trainer, root, watchdog, settings)


class RekindleMixin:
    """Attaches a trainer as it is made: ``class MyTrainer(RekindleMixin, Trainer)``.

    ``rekindle_root`` is the root, and ``rekindle_settings`` are the other arguments of ``attach``.
    """

    def __init__(
        self,
        *args: Any,
        rekindle_root: str | os.PathLike[str],
        rekindle_settings: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(*args, **options)
        attach(self, rekindle_root, **(rekindle_settings or {}))


def _check(trainer: Any) -> None:
    for name, why in _REFUSED.items():
        if getattr(trainer.args, name, None):
            raise UsageError(f"TrainingArguments.{name} can't be had with Rekindle: {why}")
    if getattr(trainer, "is_deepspeed_enabled", False):
        raise UsageError("this trainer trains by DeepSpeed, which keeps weights and optimizer itself")
    if isinstance(getattr(trainer.train, "__self__", None), Attachment):
        raise UsageError("this trainer is attached already")
    if getattr(trainer, "is_in_train", False):
        raise UsageError(
            "attach before train(): this trainer trains already; or its train() has failed, and a new trainer is needed"
        )
    lacking = [name for name in WRAPPED if not callable(getattr(trainer, name, None))]
    if lacking:
        version = importlib.import_module("transformers").__version__
        raise UsageError(
            f"the Trainer of transformers {version} has no {lacking[0]}(): Rekindle's adapter was written for "
            f"transformers {_TESTED[-1]}"
        )
    original = importlib.import_module("transformers").Trainer._inner_training_loop
    if type(trainer)._inner_training_loop is not original:
        raise UsageError(
            f"{type(trainer).__name__} has a training loop of its own, in which no step could be secured: use a "
            "rekindle.Checkpointer in that loop"
        )
