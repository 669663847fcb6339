"""Defines RekindleCallback, and refuses trainers whose training would not come back as it was."""

from __future__ import annotations

import importlib
import logging
import operator
import os
import sys
from contextlib import suppress
from typing import Any, Literal

import rekindle
from rekindle.errors import UsageError
from rekindle.integrations.lightning.run import WRAPPED, Run
from rekindle.integrations.versions import warn_if_untested
from rekindle.settings import check_settings

__all__ = ["RekindleCallback"]

log = logging.getLogger("rekindle")

_PACKAGES = ("lightning.pytorch", "pytorch_lightning")
"""The two names of one package. A Trainer takes callbacks of both."""
_TESTED = ("2.6", "2.6")
"""First and last series of Lightning that the tests have run with."""
_EMPTY = ("Callback", "CheckpointHooks")
"""Classes of Lightning's whose ``on_save_checkpoint()`` does nothing."""


def _base() -> Any:
    for name in [name for name in _PACKAGES if name in sys.modules] or _PACKAGES:
        with suppress(ModuleNotFoundError):
            return importlib.import_module(f"{name}.callbacks").Callback
    return object


class RekindleCallback(_base()):  # type: ignore[misc]
    """Lets every step of ``trainer.fit()`` be secured, and each start go on behind the newest one.

    ``Trainer(callbacks=[RekindleCallback(root)])``. ``ModelCheckpoint`` goes on as before. If the checkpoint that
    ``fit(ckpt_path=...)`` names is newer than what ``root`` has, training goes on from that one.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        watchdog: bool | float | Literal["fast"] = True,
        **settings: Any,
    ) -> None:
        """``root``: directory or URL of the checkpoints, as for ``rekindle.Checkpointer``. It holds one run.

        ``watchdog`` is that of ``Checkpointer.guard``; ``settings`` are keyword arguments for ``Checkpointer``. Raises
        UsageError for one that makes no sense, ``fit()`` for a trainer with which this can't be had.
        """
        check_settings(settings)
        self._root, self._watchdog, self._settings = root, watchdog, settings
        self._run: Run | None = None

    @property
    def checkpointer(self) -> rekindle.Checkpointer | None:
        """The Checkpointer of the newest ``fit()``; None before the first."""
        return self._run.checkpointer if self._run is not None else None

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Has Lightning restore the newest step when it has loaded all else. A trial run is left alone."""
        self._run = None
        if not trainer.fast_dev_run:
            _check(trainer, pl_module)
            self._run = Run(trainer, self._root, self._watchdog, self._settings)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Watches over training from now on."""
        self._check_started(trainer)
        if self._run is not None:
            self._run.begin()

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Refuses to let training go on unsecured: a callback may have been added within ``fit()``."""
        self._check_started(trainer)

    def _check_started(self, trainer: Any) -> None:
        if self._run is None and not trainer.fast_dev_run:
            raise UsageError(
                "this RekindleCallback was added to the trainer when fit() had begun, and secures no step of it: give "
                "it to Trainer(callbacks=[...])"
            )

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Waits until the last step is on storage."""
        if self._run is not None:
            self._run.end()

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        """Does the same where there was nothing left to train."""
        if self._run is not None:
            self._run.end()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Secures the step that the exception leaves."""
        if self._run is not None:
            self._run.fail(exception)


def _check(trainer: Any, module: Any) -> None:
    package = type(trainer.fit_loop).__module__.partition(".")[0]
    warn_if_untested(package.replace("_", "-"), *_TESTED)
    if sum(isinstance(one, RekindleCallback) for one in trainer.callbacks) > 1:
        raise UsageError("this trainer has two RekindleCallbacks, and one secures all of its training: leave one")
    if "DeepSpeed" in type(trainer.strategy).__name__:
        raise UsageError("this trainer trains by DeepSpeed, which keeps weights and optimizer itself")
    for part, name in WRAPPED:
        owner = operator.attrgetter(part)(trainer) if part else trainer
        if not callable(getattr(owner, name, None)):
            raise UsageError(
                f"this Lightning's Trainer has no {part}.{name}(): Rekindle's adapter was written for Lightning "
                f"{_TESTED[-1]}"
            )
    for one in (module, trainer.datamodule, *trainer.callbacks) if trainer.is_global_zero else ():
        if one is not None and type(one).on_save_checkpoint.__qualname__.partition(".")[0] not in _EMPTY:
            log.warning(
                "%s.on_save_checkpoint() is asked by Lightning's own checkpoints only: what it adds to them is not "
                "secured at each step, state that is in state_dict() is",
                type(one).__name__,
            )
