"""Knows the place of training in its data, and brings a new process back to it, in the middle of an epoch too.

A pass over the data is what Lightning takes between two calls of ``iter()``. The random numbers that it begins with
decide on its order. They are kept, so that a new process can begin the same pass and leave out what was had.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

from rekindle.data.generators import LoaderGenerators
from rekindle.data.parts import drop_workers, is_indexed, keeps_workers
from rekindle.errors import UsageError
from rekindle.integrations.epochs import epoch_of, warn_of_other_epoch
from rekindle.state.rng import RngState

__all__ = ["Place"]


class Place:
    """Place in the training data of one ``fit()``. Its methods take Lightning's own, around which they are put."""

    def __init__(self, trainer: Any) -> None:
        self._fit, self._epoch = trainer.fit_loop, trainer.fit_loop.epoch_loop
        self.start: dict[str, Any] | None = None
        """Random generators, and which loaders had workers already, when the newest pass began; None before that."""
        self._uncounted = 0
        """Batches of the epoch that Lightning counts, but did not take from this pass."""
        self._ahead: dict[str, Any] | None = None
        """Random generators before the newest batch was fetched, where Lightning fetches one ahead in this process."""
        self._restored: dict[str, Any] | None = None

    def state(self) -> dict[str, Any]:
        """Returns the place, without ``start``."""
        return {
            "loaders": len(self._training()),
            "epochs": [epoch_of(loader) for loader in self._training()],
            "batches": self._epoch.batch_progress.current.ready - self._uncounted if self.start is not None else 0,
            "own": [LoaderGenerators(loader).own_states() for loader in self._loaders()],
            "validation": _workers(self._validation()),
            "ahead": self._ahead,
        }

    def restore(self, state: dict[str, Any], start: dict[str, Any] | None, loaders: list[Any], *, midway: bool) -> None:
        """Lets training begin at a place. ``midway``: True if that is not the end of an epoch.

        ``loaders``: states of those loaders that have one. They count only if all have.
        """
        known = loaders if len(loaders) == state["loaders"] else []
        self._restored, self.start = {**state, "loaders": known, "midway": midway}, start

    # -- around Lightning's methods -----------------------------------------------------------------------------

    def load_loader_states(self, original: Callable[[], None]) -> None:
        """Notes the pass that Lightning is about to begin, as it sets up its data."""
        original()
        if self._restored is None:
            self.start = self._capture()

    def reset_epoch(self, original: Callable[[], None]) -> None:
        """Keeps Lightning from saying that data begins anew in the middle of an epoch, where it goes on."""
        if self._restored is None:
            original()
            return
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "You're resuming from a checkpoint that ended before the epoch ended")
            original()

    def begin_epoch(self, original: Callable[[Any], None], fetcher: Any) -> None:
        """Begins an epoch, or returns into it."""
        restored, self._restored = self._restored, None
        if restored is not None:
            self._return(fetcher, restored)
        before, start = fetcher.combined_loader._iterator, self._capture()
        original(fetcher)
        self._uncounted = self._epoch.batch_progress.current.ready
        if restored is not None:
            # else Lightning would look for a validation that was under way, and count the newest batch again
            self._epoch.restarting = False
            self._uncounted -= restored["batches"] if restored["midway"] else 0
        elif fetcher.combined_loader._iterator is not before:
            self.start = start
        if fetcher.length is None and not all(getattr(loader, "num_workers", 0) for loader in self._training()):
            fetcher._start_profiler = partial(self._note_fetch, fetcher._start_profiler)

    def _note_fetch(self, original: Callable[[], None]) -> None:
        """Notes the numbers that a batch may be made of. Training draws others before the batch's turn."""
        self._ahead = RngState().state_dict()
        original()

    # -- returning ----------------------------------------------------------------------------------------------

    def _return(self, fetcher: Any, restored: dict[str, Any]) -> None:
        """Begins the pass of the restored place once more, and leaves out its batches.

        Lightning has begun one already, before it has told the samplers the epoch.
        """
        rng, now = RngState(), RngState().state_dict()
        if restored["midway"]:
            for before, loader in zip(restored["epochs"], self._training(), strict=False):
                warn_of_other_epoch(before, epoch_of(loader), restored["batches"])
        self._make_validation_workers(restored["validation"])
        if restored["midway"] and self.start is not None and not restored["loaders"]:
            self._set(self.start)
            iter(fetcher)
            self._skip(fetcher, restored["batches"], restored["ahead"])
            rng.load_state_dict(now)
            self._load_own(restored["own"])
            return
        rng.load_state_dict(now)
        self._load_own(restored["own"])
        if restored["midway"]:
            fetcher.combined_loader._load_state_dicts(restored["loaders"])
        else:
            self.start = self._capture()
        iter(fetcher)
        if restored["midway"]:
            rng.load_state_dict(now)

    def _skip(self, fetcher: Any, count: int, ahead: dict[str, Any] | None) -> None:
        """Passes over batches: by their indices, where a sampler alone tells what they are, else by fetching them.

        Lightning fetches the next batch with the last of them: of the same random numbers as before, if ``ahead``.
        """
        combined = fetcher.combined_loader
        loader, batches = combined.flattened[0], getattr(fetcher, "iterator_wrapper", fetcher)
        try:
            if len(combined.flattened) == 1 and is_indexed(loader) and not loader.num_workers and not fetcher.fetched:
                for _ in range(count):
                    combined._iterator.iterators[0]._next_index()
                combined._iterator._idx = count
            else:
                for left in reversed(range(count)):
                    if ahead is not None and not left:
                        RngState().load_state_dict(ahead)
                    next(batches)
                fetcher.fetched -= count  # Lightning adds what the epoch has had
        except StopIteration:
            raise UsageError(
                f"{count} batches of this epoch are done, and the training data has less: it is not that of the "
                "checkpoint"
            ) from None

    # -- generators and workers ---------------------------------------------------------------------------------

    def _training(self) -> list[Any]:
        combined = self._fit._combined_loader
        return list(combined.flattened) if combined is not None else []

    def _validation(self) -> list[Any]:
        combined = self._epoch.val_loop._combined_loader
        return list(combined.flattened) if combined is not None else []

    def _loaders(self) -> list[Any]:
        return [*self._training(), *self._validation()]

    def _capture(self) -> dict[str, Any]:
        loaders = self._training()
        own = [LoaderGenerators(loader).own_states() for loader in loaders]
        return {"process": RngState().state_dict(), "own": own, "workers": _workers(loaders)}

    def _set(self, start: dict[str, Any]) -> None:
        """Makes generators and workers what they were when a pass began.

        Workers that go on from pass to pass draw a number when they are made, and none later.
        """
        for loader, had in zip(self._training(), start["workers"], strict=False):
            if not had:
                drop_workers(loader)
        RngState().load_state_dict(start["process"])
        self._load_own(start["own"])

    def _load_own(self, states: list[list[bytes]]) -> None:
        for loader, own in zip(self._loaders(), states, strict=False):
            LoaderGenerators(loader).load_own(own)

    def _make_validation_workers(self, had: list[bool]) -> None:
        for loader, there in zip(self._validation(), had, strict=False):
            if there and keeps_workers(loader) and loader._iterator is None:
                iter(loader)


def _workers(loaders: list[Any]) -> list[bool]:
    """Tells for each loader if it has workers that go on from pass to pass."""
    return [keeps_workers(loader) and loader._iterator is not None for loader in loaders]
