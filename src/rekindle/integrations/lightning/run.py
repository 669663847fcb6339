"""Runs one ``trainer.fit()``: restores before it trains, secures each step behind what Lightning does after it."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import rekindle
from rekindle.errors import RekindleError
from rekindle.integrations.epochs import warn_of_no_steps
from rekindle.integrations.lightning.closures import run_closure_first
from rekindle.integrations.lightning.place import Place
from rekindle.integrations.lightning.progress import LightningProgress

__all__ = ["WRAPPED", "Run"]

log = logging.getLogger("rekindle")

WRAPPED = (
    ("_checkpoint_connector", "resume_end"),
    ("fit_loop", "_load_combined_loader_states"),
    ("fit_loop", "on_advance_start"),
    ("fit_loop", "on_advance_end"),
    ("fit_loop.epoch_loop", "reset"),
    ("fit_loop.epoch_loop", "on_run_start"),
    ("fit_loop.epoch_loop", "on_advance_end"),
    ("fit_loop.epoch_loop.val_loop", "run"),
    ("", "save_checkpoint"),
)
"""Methods of Lightning's, by the part of a Trainer that has them: while one ``fit()`` runs, others are put around."""


class Run:
    """One ``fit()``, from the moment at which model and optimizers are there."""

    def __init__(self, trainer: Any, root: str | os.PathLike[str], watchdog: Any, settings: dict[str, Any]) -> None:
        self.checkpointer: rekindle.Checkpointer | None = None
        self._trainer, self._root, self._watchdog, self._settings = trainer, root, watchdog, settings
        self._fit = trainer.fit_loop
        self._place = Place(trainer)
        self._progress = LightningProgress(trainer, self._place, allow_pickle=settings.get("allow_pickle", False))
        self._secured = -1
        self._reached = 0
        """The step that was restored from ``root``, if training goes on from there and has not begun."""
        self._ends = ExitStack()
        """Leaves the guard, and closes the Checkpointer, at the end of training or at what it raises."""
        self._wraps = ExitStack()
        """Gives Lightning its own methods back."""
        self._wrap(trainer._checkpoint_connector, "resume_end", self._resume_end)

    def _wrap(self, owner: Any, name: str, around: Callable[..., Any]) -> None:
        """Puts a method around one of ``owner``, which it is given before the other arguments."""
        before, original = vars(owner).get(name), getattr(owner, name)
        setattr(owner, name, partial(around, original))
        self._wraps.callback(*((delattr, owner, name) if before is None else (setattr, owner, name, before)))

    # -- before training ----------------------------------------------------------------------------------------

    def _resume_end(self, original: Callable[[], None]) -> None:
        """Restores the newest step, when Lightning has loaded what ``ckpt_path`` names."""
        trainer, fit = self._trainer, self._fit
        given, named = trainer._checkpoint_connector._ckpt_path, trainer.global_step
        if trainer.lightning_module.automatic_optimization:
            for optimizer in trainer.optimizers:
                if (hook := run_closure_first(optimizer)) is not None:
                    self._wraps.callback(hook.remove)
        checkpointer = self._open()
        reached = checkpointer.restore()
        if given is not None and reached < named:
            self._take_given(given, named, reached)
        elif reached:
            self._progress.apply()
            self._reached = reached
            if given is not None and reached > named:
                log.warning(
                    "%s is of step %d, and the newest checkpoint in %s of step %d: training goes on from the latter",
                    *(given, named, self._root, reached),
                )
        self._secured = trainer.global_step
        self._wrap(fit, "_load_combined_loader_states", self._place.load_loader_states)
        self._wrap(fit, "on_advance_start", self._begin_epoch)
        self._wrap(fit, "on_advance_end", self._end_epoch)
        self._wrap(fit.epoch_loop, "reset", self._place.reset_epoch)
        self._wrap(fit.epoch_loop, "on_run_start", self._place.begin_epoch)
        self._wrap(fit.epoch_loop, "on_advance_end", self._end_batch)
        self._wrap(fit.epoch_loop.val_loop, "run", partial(self._unwatched, "validation"))
        self._wrap(trainer, "save_checkpoint", partial(self._unwatched, "a checkpoint of Lightning's own"))
        original()

    def _open(self) -> rekindle.Checkpointer:
        trainer = self._trainer
        state: dict[str, Any] = {"model": trainer.strategy.model}
        schedulers = [config.scheduler for config in trainer.lr_scheduler_configs]
        for name, entries in {"optimizer": trainer.optimizers, "scheduler": schedulers}.items():
            state |= {f"{name}_{number}" if number else name: entry for number, entry in enumerate(entries)}
        state["lightning"] = self._progress
        self.checkpointer = self._ends.enter_context(rekindle.Checkpointer(self._root, state, **self._settings))
        return self.checkpointer

    def _take_given(self, given: Any, named: int, reached: int) -> None:
        """Lets training go on from what ``ckpt_path`` names, which is newer."""
        connector = self._trainer._checkpoint_connector
        if reached:
            if self._trainer.strategy.restore_checkpoint_after_setup:
                connector.resume_start(given)
            connector.restore_model()
            connector.restore_datamodule()
            connector.restore_callbacks()
            connector.restore_training_state()
            log.warning(
                "%s is of step %d, and the newest checkpoint in %s of step %d: training goes on from the former",
                *(given, named, self._root, reached),
            )
        self._progress.forget()
        assert self.checkpointer is not None
        self.checkpointer.step(named)

    # -- training -----------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Watches over training from now on, in place of Lightning's own handler of SIGTERM."""
        assert self.checkpointer is not None
        self._reached = 0
        self._progress.set_random()
        self._ends.enter_context(self.checkpointer.guard(watchdog=self._watchdog))

    def _begin_epoch(self, original: Callable[[], None]) -> None:
        self._progress.go_on()
        original()

    def _end_batch(self, original: Callable[..., None], *args: Any) -> None:
        """Lets Lightning log and validate first: a step that is restored has all of that behind it."""
        original(*args)
        if not self._fit.epoch_loop.done:
            self._secure()

    def _end_epoch(self, original: Callable[[], None]) -> None:
        original()
        self._secure()

    def _secure(self) -> None:
        step = self._trainer.global_step
        if self.checkpointer is not None and step > self._secured:
            self._secured = step
            self.checkpointer.step(step)

    def _unwatched(self, what: str, original: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """Does something however long it takes."""
        assert self.checkpointer is not None
        with self.checkpointer.pause_watchdog(what):
            return original(*args, **options)

    # -- ending -------------------------------------------------------------------------------------------------

    def end(self) -> None:
        """Ends a training that has come to its end, or had done so before it was started again."""
        trainer = self._trainer
        if self._reached and trainer.limit_train_batches and trainer.num_training_batches and trainer.is_global_zero:
            warn_of_no_steps(self._root, self._reached)
        self._wraps.close()
        self._progress.go_on()
        try:
            self._ends.close()
        except RekindleError as error:  # the weights are there: the script is to save them
            log.error("the end of training is not on storage: %s", error)

    def fail(self, error: BaseException) -> None:
        """Ends a training that has raised ``error``. May end the process, if another rank was first to fail."""
        self._wraps.close()
        self._ends.__exit__(type(error), error, error.__traceback__)
