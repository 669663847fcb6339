"""Wraps a Trainer's methods, so that ``train()`` goes on from the newest step, and tells Rekindle of each new one."""

from __future__ import annotations

import json
import logging
import os
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import rekindle
from rekindle.errors import RekindleError, UsageError
from rekindle.integrations.epochs import epoch_of, warn_of_no_steps
from rekindle.integrations.peft import without_frozen_base
from rekindle.integrations.randomness import capture_random, set_random
from rekindle.integrations.transformers.progress import TrainerProgress
from rekindle.state.rng import RngState

__all__ = ["WRAPPED", "Attachment"]

log = logging.getLogger("rekindle")

WRAPPED = (
    "train",
    "get_train_dataloader",
    "_init_training_state",
    "_prepare_for_training",
    "_run_epoch",
    "_load_rng_state",
    "_maybe_log_save_evaluate",
    "_evaluate",
    "_save_checkpoint",
    "_finalize_training",
)
"""Methods of a Trainer, each of which becomes the one of ``Attachment`` with the same name."""


class Attachment:
    """Holds the methods of one Trainer that were wrapped, and what one call of ``train()`` needs."""

    def __init__(self, trainer: Any, root: str | os.PathLike[str], watchdog: Any, settings: dict[str, Any]) -> None:
        self.checkpointer: rekindle.Checkpointer | None = None
        """The Checkpointer of the newest ``train()``; None before the first."""
        self._trainer, self._root, self._watchdog, self._settings = trainer, root, watchdog, settings
        self._resumed = self._began = False
        """True if a step was restored, and once training has set its own counters to zero."""
        self._secured = -1
        self._ends = ExitStack()
        """Leaves the guard, and closes the Checkpointer, at the end of training or at what it raises."""
        self._original = {name: getattr(trainer, name) for name in WRAPPED}
        for name in WRAPPED:
            setattr(trainer, name, getattr(self, name))

    # -- from the call of train() to the first step -------------------------------------------------------------

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **options: Any) -> Any:
        """Trains until the end. ``resume_from_checkpoint=True`` is right at the first start, too."""
        if resume_from_checkpoint is True:
            resume_from_checkpoint = _newest_checkpoint(self._trainer.args.output_dir)
        self._resumed = self._began = False
        with self._ends:
            return self._original["train"](resume_from_checkpoint, *args, **options)

    def get_train_dataloader(self) -> Any:
        """Keeps the loader: training is prepared before the Trainer hands it over."""
        self._loader = self._original["get_train_dataloader"]()
        return self._loader

    def _init_training_state(self, max_steps: int, updates: int, epochs: int, given: Any, trial: Any) -> Any:
        """Makes model and optimizer first, restores them, and returns the place in the data of the restored step.

        ``updates``: those of an epoch. ``given``: a checkpoint of the Trainer's own to resume from, or None.
        """
        if trial is not None:
            raise UsageError("a search of hyperparameters trains many runs, and a root holds one: attach no trainer")
        trainer, original = self._trainer, self._original
        self._updates = updates
        place = original["_init_training_state"](max_steps, updates, epochs, given, trial)
        self._prepared = original["_prepare_for_training"](max_steps, self._loader, given)
        checkpointer = self._open()
        reached, named = checkpointer.restore(), trainer.state.global_step
        if reached and reached < named:
            self._load_given(given, named, reached)
        elif reached:
            self._resumed = True
            self._progress.note_restored()
            with tempfile.TemporaryDirectory() as directory:
                self._progress.write_state(directory)
                place = original["_init_training_state"](max_steps, updates, epochs, directory, trial)
            if self._over:
                warn_of_no_steps(self._root, reached)
        self._secured = trainer.state.global_step
        self._ends.enter_context(checkpointer.guard(watchdog=self._watchdog))
        return place

    def _open(self) -> rekindle.Checkpointer:
        trainer = self._trainer
        args = trainer.args
        examples = trainer._train_batch_size * args.world_size * args.gradient_accumulation_steps
        updates = self._updates if epoch_of(self._loader)[0] else 0
        self._progress = TrainerProgress(trainer, self._loader, [updates, examples])
        model = without_frozen_base(trainer.model)
        state = {"model": model, "optimizer": trainer.optimizer, "scheduler": trainer.lr_scheduler}
        if trainer.accelerator.scaler is not None:
            state["scaler"] = trainer.accelerator.scaler
        state["trainer"] = self._progress
        self.checkpointer = self._ends.enter_context(rekindle.Checkpointer(self._root, state, **self._settings))
        return self.checkpointer

    def _load_given(self, given: str, named: int, reached: int) -> None:
        """Loads a checkpoint of the Trainer's own again, over what was restored."""
        trainer = self._trainer
        trainer._load_from_checkpoint(given, *([trainer.model_wrapped] if trainer.is_fsdp_enabled else []))
        trainer._load_optimizer_and_scheduler(given)
        trainer._load_scaler(given)
        log.warning(
            "%s is of step %d, and the newest checkpoint in %s of step %d: training goes on from the former",
            *(given, named, self._root, reached),
        )

    def _prepare_for_training(self, max_steps: int, loader: Any, given: Any) -> Any:
        """Returns what was prepared already."""
        return self._prepared

    # -- training -----------------------------------------------------------------------------------------------

    def _run_epoch(self, *args: Any, **options: Any) -> None:
        """Runs an epoch, of which a resumed one has seen a part. Its last step is secured after what ends it."""
        trainer, first = self._trainer, self._begin()
        if first and self._resumed:
            if self._over:
                trainer.control.should_training_stop = True
                return
            midway = options["steps_trained_in_current_epoch"] > 0
            set_random(self._loader, self._progress.epoch_start if midway else self._progress.step_end)
            options["resume_from_checkpoint"] = os.fspath(self._root)  # any at all: batches are skipped by it
        self._progress.epoch_start = capture_random(self._loader)
        self._original["_run_epoch"](*args, **options)
        self._secure()

    @property
    def _over(self) -> bool:
        """True if the restored run has no step left to train."""
        state = self._trainer.state
        return bool(state.global_step >= state.max_steps or self._progress.stopped)

    def _begin(self) -> bool:
        """Sets what was restored, once training has set it to zero. Returns True the first time."""
        first, self._began = not self._began, True
        if first and self._resumed:
            self._progress.apply()
        return first

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Sets the random generators, when the batches before the restored step have been skipped."""
        if self._resumed:
            RngState().load_state_dict(self._progress.step_end["global"])
        else:
            self._original["_load_rng_state"](checkpoint)

    def _maybe_log_save_evaluate(self, *args: Any, **options: Any) -> None:
        """Lets the Trainer log, evaluate and save first: a step that is restored has all of that behind it."""
        self._original["_maybe_log_save_evaluate"](*args, **options)
        control, step = self._trainer.control, self._trainer.state.global_step
        if not (control.should_epoch_stop or control.should_training_stop or step % self._updates == 0):
            self._secure()

    def _secure(self) -> None:
        step = self._trainer.state.global_step
        if self.checkpointer is not None and step > self._secured:
            self._secured = step
            self.checkpointer.step(step)

    def _evaluate(self, *args: Any, **options: Any) -> Any:
        """Evaluates, however long it takes; not once more what ``eval_on_start`` had evaluated."""
        if self._resumed and not self._began:
            return {}
        return self._unwatched("evaluation", "_evaluate", *args, **options)

    def _save_checkpoint(self, *args: Any, **options: Any) -> Any:
        """Saves a checkpoint of the Trainer's own, however long it takes."""
        return self._unwatched("a checkpoint of the Trainer's own", "_save_checkpoint", *args, **options)

    def _unwatched(self, what: str, name: str, *args: Any, **options: Any) -> Any:
        if self.checkpointer is None:
            return self._original[name](*args, **options)
        with self.checkpointer.pause_watchdog(what):
            return self._original[name](*args, **options)

    def _finalize_training(self, *args: Any, **options: Any) -> Any:
        """Ends the run before the Trainer does: it may load the best weights over the last ones."""
        self._begin()
        try:
            self._ends.close()
        except RekindleError as error:  # the weights are there: the script is to save them
            log.error("the end of training is not on storage: %s", error)
        return self._original["_finalize_training"](*args, **options)


def _newest_checkpoint(directory: str) -> str | None:
    """Returns the path of the newest checkpoint of a Trainer's own; None if there is none.

    The file with its state is written last, so one without it is passed over.
    """
    found: dict[int, str] = {}
    for file in Path(directory).glob("checkpoint-*/trainer_state.json"):
        try:
            found[json.loads(file.read_text(encoding="utf-8"))["global_step"]] = str(file.parent)
        except (ValueError, KeyError):  # cut short
            continue
    return found[max(found)] if found else None
