"""Fetches batches, and passes over those that an earlier process has had: by fetching them again, or by indices."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rekindle.data.generators import Seeds, isolated
from rekindle.data.numbered import number_batches
from rekindle.data.parts import is_indexed

__all__ = ["Fetching", "choose_fetching"]


class Fetching:
    """Passes over batches by fetching them again, which brings workers and datasets where they were."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader

    def open(self, epoch: int, first: int) -> Iterator[Any]:
        """Returns an iterator over the batches of an epoch, from that of number ``first`` on.

        Raises StopIteration if there are less.
        """
        inner: Iterator[Any] = iter(self.loader)
        for number in range(first):
            self.fetch(inner, epoch, number)
        return inner

    def fetch(self, inner: Iterator[Any], epoch: int, number: int) -> Any:
        """Returns the next batch, which is that of ``number``. Raises StopIteration after the last one."""
        return next(inner)


class _ByIndices(Fetching):
    """Passes over batches by their indices, where this process fetches: then only the sampler keeps a place."""

    def open(self, epoch: int, first: int) -> Iterator[Any]:
        inner: Any = iter(self.loader)
        for _ in range(first):
            inner._next_index()
        return inner  # type: ignore[no-any-return]


class _Isolated(Fetching):
    """Fetches each batch in this process under a seed of its own: training's generators have no part in it."""

    def __init__(self, loader: Any, seeds: Seeds) -> None:
        super().__init__(loader)
        self._seeds = seeds

    def fetch(self, inner: Iterator[Any], epoch: int, number: int) -> Any:
        with isolated(self._seeds.of(epoch, number)):
            return next(inner)


class _Numbered(Fetching):
    """Lets the sampler number the batches, so that whoever fetches one knows its seed."""

    def __init__(self, loader: Any, seeds: Seeds) -> None:
        numbered, self._sampler = number_batches(loader, seeds)
        super().__init__(numbered)

    def open(self, epoch: int, first: int) -> Iterator[Any]:
        self._sampler.epoch = epoch
        self._sampler.first = first if self.loader.num_workers else 0
        inner: Any = iter(self.loader)  # workers are given their first indices here
        for _ in range(first - self._sampler.first):
            inner._next_index()
        return inner  # type: ignore[no-any-return]


def choose_fetching(loader: Any, seeds: Seeds | None) -> Fetching:
    """Returns the cheapest way that gives the bits of an unbroken run, under ``seeds`` if batches have their own."""
    workers = getattr(loader, "num_workers", 0)
    if is_indexed(loader):
        if seeds is not None:
            return _Numbered(loader, seeds)
        return Fetching(loader) if workers else _ByIndices(loader)
    return Fetching(loader) if seeds is None or workers else _Isolated(loader, seeds)
