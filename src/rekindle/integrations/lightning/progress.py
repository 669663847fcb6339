"""Saves and restores what a Trainer keeps besides weights, optimizers and schedules, as one entry of the state.

Lightning's own checkpoints lack a part of it: the place in the data, random numbers, and what was logged in the epoch.
"""

from __future__ import annotations

import json
from typing import Any

from rekindle.errors import UnsupportedValueError
from rekindle.integrations.lightning.logged import capture_logged, set_logged
from rekindle.integrations.lightning.packed import Packer
from rekindle.integrations.lightning.place import Place
from rekindle.state.codec import decode, encode
from rekindle.state.rng import RngState

__all__ = ["LightningProgress"]


class LightningProgress:
    """Entry of the state. All tensors are in one, and all values in a text: their structure may change any time."""

    def __init__(self, trainer: Any, place: Place, *, allow_pickle: bool) -> None:
        self._trainer, self._place = trainer, place
        self._packer = Packer(trainer.strategy.root_device, allow_pickle=allow_pickle)
        self._start: tuple[Any, str] = (None, json.dumps(None))
        """The newest start of a pass, and its text: it stays the same for an epoch."""
        self._loaded: dict[str, Any] | None = None
        """State that was restored, until training goes on: the trainer does not have all of it before."""
        self._tree: dict[str, Any] = {}
        self._rng: dict[str, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        """Returns the progress after the newest step. The tensor is the live one."""
        if self._loaded is not None:
            return self._loaded
        try:
            text, tensors = self._packer.pack(self._collect())
        except UnsupportedValueError as error:
            raise UnsupportedValueError(f"the state of a callback, the data module or a loader: {error}") from None
        if self._place.start is not self._start[0]:
            self._start = self._place.start, json.dumps(encode(self._place.start))
        return {"progress": text, "pass": self._start[1], "tensors": tensors}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Keeps ``state`` for the other methods."""
        self._loaded = {**state, "tensors": state["tensors"].clone()}

    def _collect(self) -> dict[str, Any]:
        trainer = self._trainer
        data = trainer.datamodule
        return {
            "loops": trainer.fit_loop.state_dict(),
            "callbacks": {one.state_key: state for one in trainer.callbacks if (state := one.state_dict())},
            "datamodule": data.state_dict() if data is not None else {},
            "precision": trainer.precision_plugin.state_dict(),
            "should_stop": trainer.should_stop,
            "logged": capture_logged(trainer),
            "place": self._place.state(),
        }

    # -- going on -----------------------------------------------------------------------------------------------

    def apply(self) -> None:
        """Sets what was restored as far as Lightning is to find it before training begins."""
        assert self._loaded is not None
        trainer = self._trainer
        self._tree = tree = self._packer.unpack(self._loaded["progress"], self._loaded["tensors"])
        self._rng = RngState().state_dict()
        loops = tree["loops"]
        loaders = loops["state_dict"].pop("combined_loader", [])
        trainer.fit_loop.load_state_dict(loops)
        trainer.fit_loop._combined_loader_states_to_load = []
        trainer.fit_loop.epoch_loop.val_loop.restarting = True  # else it would be tried out, as at a first start
        trainer.should_stop = tree["should_stop"]
        for callback in trainer.callbacks:
            if callback.state_key in tree["callbacks"]:
                callback.load_state_dict(tree["callbacks"][callback.state_key])
        if trainer.datamodule is not None and tree["datamodule"]:
            trainer.datamodule.load_state_dict(tree["datamodule"])
        if tree["precision"]:
            trainer.precision_plugin.load_state_dict(tree["precision"])
        self._place.restore(tree["place"], decode(json.loads(self._loaded["pass"])), loaders, midway=self._midway())

    def set_random(self) -> None:
        """Sets the random generators of the restored step, until training goes on. Before, they may have been used."""
        if self._loaded is not None:
            RngState().load_state_dict(self._rng)

    def go_on(self) -> None:
        """Sets the rest of what was restored, as training begins."""
        if self._loaded is None:
            return
        self.set_random()
        set_logged(self._trainer, self._tree["logged"])
        if not self._midway():  # with max_steps Lightning takes any restored state for one within an epoch
            self._trainer.fit_loop._restarting = False
            self._trainer.fit_loop.epoch_loop.restarting = False
        self._loaded, self._tree = None, {}

    def _midway(self) -> bool:
        epochs = self._tree["loops"]["epoch_progress"]["current"]
        return bool(epochs["processed"] < epochs["started"])

    def forget(self) -> None:
        """Leaves out what was restored: training goes on from something else."""
        self._loaded = None
