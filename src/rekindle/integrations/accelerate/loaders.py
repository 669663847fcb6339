"""Saves the place in its data of a loader that Accelerate has prepared, and lets it go on from there."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

import torch

from rekindle.integrations.epochs import epoch_of, warn_of_other_epoch
from rekindle.integrations.randomness import capture_random, own_generators, set_own_generators, set_random
from rekindle.state.rng import RngState

__all__ = ["LoaderPosition"]

log = logging.getLogger("rekindle")


class LoaderPosition:
    """Entry of the state: epoch and batches of a loader, and the random numbers that its epoch began with.

    Accelerate's loader iterates over another one, its base, and fetches one batch ahead. The base's ``__iter__`` is
    replaced by one that counts. When a restored epoch begins, that sets the random generators to where they were when
    the epoch began, so that it is shuffled alike; behind the first batch they are set to the restored step's. Where
    fetching a batch draws random numbers in this process, the first batch may draw others than before.
    """

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self._fetched = self._first = 0
        """Batches of this epoch that the base has given, and that had been trained on before a restore."""
        self._epoch, self._exhausted = 0, False
        """The epoch of the newest pass, and True once that has no batches left in the base."""
        self._restored: dict[str, Any] | None = None
        """State of a pass to be resumed by the next ``iter()``."""
        self._start = capture_random(loader)
        """Random generators as they were when the pass began."""
        self._iterate = None
        if isinstance(loader, importlib.import_module("accelerate.data_loader").DataLoaderShard):
            self._iterate = loader.base_dataloader.__iter__
            loader.base_dataloader.__iter__ = self._pass
        else:
            log.warning(
                "a %s is read by one process for the others, or by another library: after a restart it begins its "
                "epoch again. Give Accelerator(dataloader_config=DataLoaderConfiguration(dispatch_batches=False))",
                type(loader).__name__,
            )

    def state_dict(self) -> dict[str, Any]:
        """Returns the epoch and the batches of it that training has been given."""
        if self._restored is not None:
            return self._restored
        batches = self._given()
        start = self._start if batches else {**self._start, "own": own_generators(self._loader)}
        place = {"epoch": getattr(self._loader, "iteration", 0), "batches": batches, "start": start}
        return {**place, "epoch_of": epoch_of(self._loader)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Lets the next pass go on behind ``state``."""
        self._loader.iteration = state["epoch"]
        self._restored = None
        if state["batches"] and self._iterate is not None:
            self._restored = state
        else:
            set_own_generators(self._loader, state["start"]["own"])

    def _given(self) -> int:
        if self._exhausted:  # the last batch is being trained on, or the loop is over and the next epoch has begun
            return self._fetched if self._loader.iteration == self._epoch else 0
        return max(self._fetched - 1, self._first)

    # -- passes -------------------------------------------------------------------------------------------------

    def _pass(self) -> Iterator[Any]:
        """Iterates over the base once. Takes the place of its ``__iter__``."""
        restored, self._restored = self._restored, None
        after: dict[str, Any] | None = None
        if restored is not None:
            warn_of_other_epoch(restored.get("epoch_of"), epoch_of(self._loader), restored["batches"])
            after = RngState().state_dict()
            set_random(self._loader, restored["start"])
        self._start = capture_random(self._loader)
        self._epoch, self._exhausted = self._loader.iteration, False
        self._first = self._fetched = restored["batches"] if restored is not None else 0
        try:
            for batch in self._batches(self._first):
                self._fetched += 1
                yield batch
                if after is not None:
                    RngState().load_state_dict(after)
                    after = None
            self._exhausted = True
        finally:
            if after is not None:
                RngState().load_state_dict(after)
            if not self._exhausted:  # left in the middle: the next pass is one from the start
                self._first = self._fetched = 0
        if restored is not None and self._fetched == self._first:
            self._loader.iteration += 1  # which Accelerate leaves out when there is not one batch

    def _batches(self, passed: int) -> Iterable[Any]:
        """Returns the batches behind the first ``passed``. Those are not even fetched where a sampler chooses them."""
        assert self._iterate is not None
        base = self._loader.base_dataloader
        chosen = not isinstance(base.dataset, torch.utils.data.IterableDataset) and not hasattr(base, "state_dict")
        if passed and chosen:
            skipping = importlib.import_module("accelerate").skip_first_batches(self._loader, passed)
            passed_over: Iterable[Any] = skipping.base_dataloader
            return passed_over
        return islice(self._iterate(), passed, None)
