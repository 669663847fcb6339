"""Defines Resumable: a loader whose place, in the middle of an epoch too, is saved and restored with the state."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator
from typing import Any, Literal

from rekindle.data.fetching import choose_fetching
from rekindle.data.generators import LoaderGenerators, Seeds
from rekindle.data.parts import drop_workers, keeps_workers, samples_per_step, set_epoch
from rekindle.errors import UsageError

__all__ = ["Resumable"]

log = logging.getLogger("rekindle")


class Resumable:
    """Iterates over a loader, and goes on after a restart with the batch that comes next.

    ::

        data = Resumable(DataLoader(dataset, batch_size=8, shuffle=True, num_workers=2))
        ckpt = rekindle.Checkpointer(root, state={"model": model, "optimizer": optimizer, "data": data})
        step = ckpt.restore()
        for epoch in range(data.epoch, 10):
            for batch in data:
                ...
                ckpt.step(step := step + 1)

    loader
        A DataLoader, or anything else that can be iterated over again and again in an order that comes from random
        generators: those of the process, and those that the loader or its sampler has as ``generator``.
    exact
        "replay" gives the batches that the loader itself gives. After a restart it fetches those of the epoch that are
        done once more, unless a sampler alone can tell. "seeded" fetches each batch under a seed of its own, which
        depends on epoch, batch and rank: nothing is fetched again, and what is drawn differs from the loader's own.

    An epoch that is left by ``break`` is gone on with by the next ``for``. Each epoch's number goes to ``set_epoch()``
    of samplers and datasets that have it. Other attributes are the loader's. docs/data.md tells what is exact.

    For one iteration at a time, and not thread-safe. Raises UsageError for what can't be iterated over again.
    """

    def __init__(self, loader: Iterable[Any], exact: Literal["replay", "seeded"] = "replay") -> None:
        if exact not in ("replay", "seeded"):
            raise UsageError(f"exact is {exact!r}: must be 'replay' or 'seeded'")
        if not hasattr(loader, "__iter__") or hasattr(loader, "__next__"):
            raise UsageError(f"a {type(loader).__name__} can't be iterated over again: give what makes iterators")
        self._loader = loader
        self.epoch = 0
        """Epochs that are done."""
        self.batches = 0
        """Batches of this epoch that have been handed out."""
        self._seeds = Seeds()
        self._generators = LoaderGenerators(loader)
        self._start: dict[str, Any] | None = None  # the generators when the newest epoch began
        self._fetching = choose_fetching(loader, self._seeds if exact == "seeded" else None)
        self._inner: Iterator[Any] | None = None

    def __iter__(self) -> Iterator[Any]:
        """Yields the batches of this epoch that are left."""
        while True:
            try:
                if self._inner is None:
                    self._inner = self._open()
                batch = self._fetching.fetch(self._inner, self.epoch, self.batches)
            except StopIteration:
                self._inner = None
                self.epoch, self.batches = self.epoch + 1, 0
                return
            except BaseException:  # the place stays: the next iteration comes to this batch again
                self._close()
                raise
            self.batches += 1
            yield batch

    def __len__(self) -> int:
        """Returns the number of batches of a whole epoch."""
        return len(self._loader)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_loader":
            raise AttributeError(name)
        return getattr(self._loader, name)

    def state_dict(self) -> dict[str, Any]:
        """Returns the place: the batches that were handed out, not those that workers have ahead."""
        return {
            "epoch": self.epoch,
            "batches": self.batches,
            "samples_per_step": samples_per_step(self._loader),
            "seeds": self._seeds.base,
            "start": self._start,
            "own": self._generators.own_states(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes a place, to which the next iteration goes."""
        self._close()
        self.epoch, self.batches, self._start = state["epoch"], state["batches"], state["start"]
        self._seeds.base = state["seeds"]
        self._generators.load_own(state["own"])
        before, now = state["samples_per_step"], samples_per_step(self._loader)
        if before != now and self.batches:
            done = self.batches
            self.batches = done * before // now
            log.warning(
                "data: all ranks together took %d samples at a time, now %d, so %d batches of epoch %d count as %d; "
                "some come twice or never where that leaves a rest, or the ranks share out another order",
                *(before, now, done, self.epoch, self.batches),
            )

    def _close(self) -> None:
        self._inner = None
        drop_workers(self._fetching.loader)

    def _open(self) -> Iterator[Any]:
        """Begins this epoch, or returns to the place in it, for which training's generators stay as they are."""
        set_epoch(self._loader, self.epoch)
        self._make_workers()
        if not self.batches:
            self._start = self._generators.state_dict()
            return self._fetching.open(self.epoch, 0)
        began = time.monotonic()
        with self._generators.untouched():
            if self._start is not None:
                self._generators.load_state_dict(self._start)
            try:
                inner = self._fetching.open(self.epoch, self.batches)
            except StopIteration:
                raise UsageError(
                    f"data: {self.batches} batches of epoch {self.epoch} are done, and the loader has less: "
                    "its dataset is not that of the checkpoint"
                ) from None
        seconds = time.monotonic() - began
        log.info("data: passed over %d batches of epoch %d in %.1f s", self.batches, self.epoch, seconds)
        return inner

    def _make_workers(self) -> None:
        """Makes workers that an unbroken run would have from an earlier epoch.

        Their making draws a number, which the order of this epoch must not feel.
        """
        loader: Any = self._fetching.loader
        if self.epoch and keeps_workers(loader) and loader._iterator is None:
            with self._generators.untouched():
                iter(loader)
