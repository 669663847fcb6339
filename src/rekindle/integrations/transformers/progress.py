"""Saves and restores what a Trainer keeps besides weights, optimizer and schedule, as one entry of the state.

The Trainer's own checkpoints lack a part of it: the losses since the newest log, which its next log and ``train_loss``
are made of; the states of callbacks; the random numbers that the epoch began with.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch

from rekindle.integrations.epochs import warn_of_other_epoch
from rekindle.integrations.randomness import capture_random, own_generators
from rekindle.state.rng import RngState

__all__ = ["TrainerProgress"]

_STATE_FILE = "trainer_state.json"
_COUNTED = ("_metrics", "_total_train_tokens")
"""Attributes of TRL's trainers, which average the former from log to log."""


class TrainerProgress:
    """Entry of the state. Plain values go into JSON, as the Trainer's own do: their structure may change any time."""

    def __init__(self, trainer: Any, loader: Any, epoch: list[int]) -> None:
        """``loader``: that of the training's data, an ``epoch`` of which has so many updates, of so many examples."""
        if not hasattr(trainer, "_tr_loss"):  # made by train(), later than this
            trainer._tr_loss = torch.zeros((), device=trainer.args.device)
        self._trainer, self._loader, self._epoch = trainer, loader, epoch
        self._log = _LogText()
        self._exportable = importlib.import_module("transformers.trainer_callback").ExportableState
        self._loaded: dict[str, Any] = {}
        self._pending = False
        """True from a restore until training has begun: the trainer doesn't have yet what was restored."""
        self.epoch_start = capture_random(loader)
        """Random generators as they were when the epoch began, of whose numbers a shuffled order may be made."""
        self.step_end = self.epoch_start
        """Those of the restored step."""

    def state_dict(self) -> dict[str, Any]:
        """Returns the progress after the newest step. The tensor is the live one."""
        if self._pending:
            return self._loaded
        trainer = self._trainer
        counted = {name: getattr(trainer, name) for name in _COUNTED if hasattr(trainer, name)}
        return {
            "state": self._state_text(),
            "counted": json.dumps(counted, default=_plain),
            "loss": trainer._tr_loss,
            "total_loss": getattr(trainer, "_total_loss_scalar", 0.0),
            "epoch_of": self._epoch,
            "first_step": getattr(trainer, "_initial_global_step", 0),  # train_loss is a mean of the steps behind it
            "last_logged": getattr(trainer, "_globalstep_last_logged", 0),
            "flos": trainer.current_flos,
            "epoch_start": self.epoch_start,
            "own_generators": own_generators(self._loader),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Keeps ``state`` for the other methods: training makes anew, as it begins, what would be set here."""
        self._loaded = {**state, "loss": state["loss"].clone()}
        self.epoch_start = state["epoch_start"]

    def _state_text(self) -> str:
        state = self._trainer.state
        kept = {field.name: getattr(state, field.name) for field in fields(state)}
        log = self._log.of(kept.pop("log_history"))
        kept["stateful_callbacks"] = type(state)(stateful_callbacks=list(self._callbacks())).stateful_callbacks
        return f'{json.dumps(kept, default=_plain)[:-1]}, "log_history": [{log}]}}'

    def _callbacks(self) -> Iterator[Any]:
        trainer = self._trainer
        return (
            one for one in [*trainer.callback_handler.callbacks, trainer.control] if isinstance(one, self._exportable)
        )

    # -- going on -----------------------------------------------------------------------------------------------

    def note_restored(self) -> None:
        """Notes that training goes on from what was restored, and the random generators of that step."""
        self._pending = True
        warn_of_other_epoch(self._loaded.get("epoch_of"), self._epoch, json.loads(self._loaded["state"])["global_step"])
        self.step_end = {"global": RngState().state_dict(), "own": self._loaded["own_generators"]}

    def write_state(self, directory: str) -> None:
        """Writes the restored ``TrainerState`` to a file, from which the Trainer finds its place in the data."""
        (Path(directory) / _STATE_FILE).write_text(self._loaded["state"], encoding="utf-8")

    def apply(self) -> None:
        """Sets what was restored. To be called when training is about to begin, and has set it to zero."""
        trainer, loaded = self._trainer, self._loaded
        self._pending = False
        trainer._tr_loss = loaded["loss"].to(trainer.args.device)
        trainer._total_loss_scalar = loaded["total_loss"]
        trainer._initial_global_step = loaded["first_step"]
        trainer._globalstep_last_logged = loaded["last_logged"]
        trainer.current_flos = loaded["flos"]
        for name, value in json.loads(loaded["counted"]).items():
            if name == "_metrics":
                for mode, metrics in value.items():
                    trainer._metrics[mode].update(metrics)
            else:
                setattr(trainer, name, value)
        self._apply_to_callbacks()

    def _apply_to_callbacks(self) -> None:
        """Sets the attributes of callbacks that have states. The Trainer does so on demand only, and makes new ones."""
        saved = json.loads(self._loaded["state"])["stateful_callbacks"]
        left = {name: list(found) if isinstance(found, list) else [found] for name, found in saved.items()}
        for callback in self._callbacks():
            states = left.get(type(callback).__name__)
            if states and callback is not self._trainer.control:
                for name, value in states.pop(0).get("attributes", {}).items():
                    setattr(callback, name, value)

    @property
    def stopped(self) -> bool:
        """True if a callback ended the restored training before its last step."""
        state = json.loads(self._loaded["state"])
        stop = state["stateful_callbacks"]["TrainerControl"]["args"]["should_training_stop"]
        return bool(stop) and state["global_step"] < state["max_steps"]


class _LogText:
    """Encodes a log that grows at its end. Each of its entries is encoded once: every step saves all of them."""

    def __init__(self) -> None:
        self._text, self._count = "", 0
        self._last: Any = None

    def of(self, log: list[Any]) -> str:
        """Returns the entries as JSON, without the brackets."""
        if self._count > len(log) or (self._count and log[self._count - 1] is not self._last):
            self._text, self._count = "", 0  # another log
        if len(log) > self._count:
            new = (json.dumps(entry, default=_plain) for entry in log[self._count :])
            self._text = ", ".join([*([self._text] if self._text else []), *new])
            self._count, self._last = len(log), log[-1]
        return self._text


def _plain(value: Any) -> Any:
    """Returns a number of NumPy or torch as Python's, and a text for anything else."""
    return value.item() if hasattr(value, "item") else str(value)
