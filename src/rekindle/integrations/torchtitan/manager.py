"""Defines a checkpoint manager for torchtitan's trainer, by which every step is secured.

Written for torchtitan 0.3. It is derived from torchtitan's own manager, which goes on to load what a run begins with
and to save the checkpoint of its last step.
"""

from __future__ import annotations

import importlib
import logging
import os
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Literal

import rekindle
from rekindle.errors import NotFoundError, RekindleError, UsageError
from rekindle.integrations.torchtitan.parts import entries_of
from rekindle.integrations.versions import warn_if_untested
from rekindle.settings import check_settings
from rekindle.state.rng import RNG

__all__ = ["RekindleCheckpointManager"]

log = logging.getLogger("rekindle")

_TESTED = ("0.3", "0.3")
"""First and last series of torchtitan that the tests have run with."""
_FOLDER = "rekindle"
"""Directory in the manager's own folder. Its name holds no ``step-``, by which torchtitan finds checkpoints of its own,
and removes them."""
_STEP = "train_state"
"""Key of the trainer itself, which counts the steps."""

_filesystem = importlib.import_module("torchtitan.tools.filesystem")
_Manager: Any = importlib.import_module("torchtitan.components.checkpointer").CheckpointManager


class RekindleCheckpointManager(_Manager):  # type: ignore[misc]  # torchtitan's classes are unknown here
    """Secures the state after each step, and brings back the newest one: weights, optimizers, schedules, the place in
    the data, the counters of the trainer and the random generators.

    ::

        config.checkpoint = RekindleCheckpointManager.Config(enable=True, interval=1)

    What ``folder`` has of Rekindle's goes before torchtitan's own checkpoints in it. Where there is nothing of
    Rekindle's, these are loaded, or ``initial_load_path``, as torchtitan does.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(_Manager.Config):  # type: ignore[misc]  # as above
        """torchtitan's options of checkpoints, and Rekindle's.

        ``interval`` is that of snapshots in memory, ``keep_latest_k`` the checkpoints that stay on storage.
        """

        settings: dict[str, Any] = field(default_factory=dict)
        """Other arguments of ``rekindle.Checkpointer``."""

        watchdog: bool | float | Literal["fast"] = True
        """As for ``Checkpointer.guard``."""

        def __post_init__(self) -> None:
            _Manager.Config.__post_init__(self)
            check_settings(_settings(self))
            if _STEP in self.exclude_from_loading:
                raise UsageError(
                    f"exclude_from_loading has {_STEP!r}, which holds the number of the restored step: to begin anew "
                    "with weights that are there, give initial_load_path and an empty folder"
                )

    def __init__(self, config: Any, **parts: Any) -> None:
        """Takes what torchtitan's own manager does. Nothing is opened before ``load()``."""
        self._config = config
        self._checkpointer: rekindle.Checkpointer | None = None
        self._ends = ExitStack()
        """Leaves the guard, and closes the Checkpointer, at the end of training or at what it raises."""
        self._validates: Callable[[int], bool] = lambda step: False
        self._deferred: int | None = None
        """The step that is complete, and secured once it is validated; None if there is none."""
        self._completed = 0
        super().__init__(config, **parts)
        if self.enable:
            warn_if_untested("torchtitan", *_TESTED)

    def __del__(self) -> None:
        """Does nothing, unlike torchtitan's: what nobody has closed is left as after a fault."""

    # -- loading ------------------------------------------------------------------------------------------------

    def _load(self, step: int = -1) -> bool:
        """Restores the newest step, or ``step``. Without any of Rekindle's it loads as torchtitan does."""
        entries = entries_of(self.states)
        root = _filesystem.join(self.folder, _FOLDER)
        state = {name: entry for found in entries.values() for name, entry in found.items()}
        checkpointer = rekindle.Checkpointer(root, state, **_settings(self._config))
        self._checkpointer = self._ends.enter_context(checkpointer)
        reached = self._restore(checkpointer, step, self._chosen(entries))
        loaded = reached > 0 or bool(super()._load(step))
        self._completed = self.states[_STEP].step
        self._follow_validation(checkpointer)
        if not self.load_only:
            self._ends.enter_context(checkpointer.guard(watchdog=self._config.watchdog))
        return loaded

    def _chosen(self, entries: dict[str, dict[str, Any]]) -> list[str] | Literal[False]:
        """Names the entries to restore, as ``restore(partial=)`` takes them: all but those of excluded keys."""
        unknown = sorted(set(self.exclude_from_loading) - entries.keys())
        if unknown:
            raise UsageError(f"exclude_from_loading: {unknown[0]!r} is none of {', '.join(entries)}")
        if not self.exclude_from_loading:
            return False
        generators = [RNG] if self._config.settings.get("rng", True) else []
        return [name for key in entries if key not in self.exclude_from_loading for name in entries[key]] + generators

    def _restore(self, checkpointer: rekindle.Checkpointer, step: int, chosen: list[str] | Literal[False]) -> int:
        """Returns the restored step; 0 where torchtitan's own checkpoints are to be looked for."""
        if step == -1:
            reached = checkpointer.restore(partial=chosen)
            self._tell_of_newer(reached)
            return reached
        try:
            return checkpointer.restore(step, partial=chosen)
        except NotFoundError:
            if not _filesystem.isdir(self._create_checkpoint_id(step)):
                raise
        return checkpointer.restore(0)

    def _tell_of_newer(self, reached: int) -> None:
        own = self._find_load_step() if reached and os.environ.get("RANK", "0") == "0" else -1
        if own > reached:
            log.warning(
                "%s has a checkpoint of torchtitan's own of step %d, and Rekindle's newest is of step %d: training "
                "goes on from the latter; checkpoint.load_step=%d takes the former",
                *(self.folder, own, reached, own),
            )

    def _follow_validation(self, checkpointer: rekindle.Checkpointer) -> None:
        """Lets a step be secured behind its validation, which draws random numbers and may take any time."""
        validator = getattr(self.states.get(_STEP), "validator", None)
        if validator is None:
            return
        original, self._validates = validator.validate, validator.should_validate

        def validate(*args: Any, **options: Any) -> Any:
            with checkpointer.pause_watchdog("validation"):
                result = original(*args, **options)
            self._secure_deferred()
            return result

        validator.validate = validate

    # -- saving -------------------------------------------------------------------------------------------------

    def _save(self, curr_step: int, last_step: bool = False) -> bool:
        """Secures a step. Of the last one torchtitan's own checkpoint comes first: a restart would not make it."""
        checkpointer = self._checkpointer
        if checkpointer is None:  # a seed checkpoint, which is made without a load before it
            return bool(super()._save(curr_step, last_step))
        if self.load_only:
            return False
        if last_step:
            with checkpointer.pause_watchdog("torchtitan's checkpoint of the last step"):
                super()._save(curr_step, last_step=True)
        self._deferred = self._completed = curr_step
        if not self._validates(curr_step):
            self._secure_deferred()
        return bool(self._should_save(curr_step, last_step))

    def _secure_deferred(self) -> None:
        step, self._deferred = self._deferred, None
        if step is None or self._checkpointer is None:
            return
        if step == 1 and self.enable_first_step_checkpoint:
            self._checkpointer.save(step)
        else:
            self._checkpointer.step(step)

    # -- ending -------------------------------------------------------------------------------------------------

    def _close(self) -> None:
        """Waits until the last step is on storage. After an error it doesn't, and secures what it can."""
        raised = sys.exc_info()
        try:
            if raised[0] is None:
                self._secure_deferred()
                self._take_back_canceled()
            self._ends.__exit__(*raised)
        except RekindleError as error:  # torchtitan's own checkpoint is there: the trainer is to end well
            log.error("the end of training is not on storage: %s", error)
        super()._close()

    def _take_back_canceled(self) -> None:
        """Sets the trainer back to its last complete step: one for which the data did not last is counted by then."""
        if self._checkpointer is not None:
            self.states[_STEP].step = self._completed


def _settings(config: Any) -> dict[str, Any]:
    """Returns the arguments of ``rekindle.Checkpointer`` besides root and state."""
    kept = {"keep": config.keep_latest_k} if config.keep_latest_k else {"keep_every": 1}
    return {"snapshot_every": config.interval, **kept, **config.settings}
