"""Numbers the batches of a DataLoader, so that each is fetched under a seed of its own, by this process or a worker."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any, NamedTuple

from torch.utils.data import DataLoader
from torch.utils.data._utils.fetch import _MapDatasetFetcher

from rekindle.data.generators import Seeds, isolated

__all__ = ["NumberedSampler", "number_batches"]


class _Numbered(NamedTuple):
    """Goes to a worker in place of the indices of a batch."""

    seed: int
    indices: Any


class NumberedSampler:
    """Gives the indices of each batch a seed. It is lazy, as samplers are that draw when the first index is wanted."""

    def __init__(self, sampler: Any, seeds: Seeds) -> None:
        self._sampler, self._seeds = sampler, seeds
        self.epoch = self.first = 0
        """The epoch, and the first of its batches that is wanted."""

    def __iter__(self) -> Iterator[_Numbered]:
        epoch, first = self.epoch, self.first
        for number, indices in enumerate(self._sampler):
            if number >= first:
                yield _Numbered(self._seeds.of(epoch, number), indices)

    def __len__(self) -> int:
        return len(self._sampler)


class _PassedOn:
    """Stands for the dataset: gives indices on to the collation, which fetches. All else is the dataset's own."""

    def __init__(self, dataset: Any) -> None:
        vars(self)["_dataset"] = dataset

    def __getitem__(self, numbered: _Numbered) -> _Numbered:
        return numbered

    def __getitems__(self, numbered: _Numbered) -> _Numbered:
        return numbered

    def __len__(self) -> int:
        return len(self._dataset)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_dataset":  # pickle asks for these before there is a dataset
            raise AttributeError(name)
        return getattr(self._dataset, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._dataset, name, value)  # a worker_init_fn may set what it finds in get_worker_info()


class _SeededFetch:
    """Stands for the collation: fetches the samples of a batch and joins them, both under the batch's seed."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        batched = loader.batch_sampler is not None
        self._fetcher = _MapDatasetFetcher(loader.dataset, batched, loader.collate_fn, loader.drop_last)

    def __call__(self, numbered: _Numbered) -> Any:
        with isolated(numbered.seed):
            return self._fetcher.fetch(numbered.indices)  # type: ignore[no-untyped-call]


def number_batches(loader: DataLoader[Any], seeds: Seeds) -> tuple[DataLoader[Any], NumberedSampler]:
    """Returns a copy of a loader that fetches each batch under its seed, and the sampler that gives them.

    DataLoader refuses another sampler or dataset once it is made, so the copy's attributes are set past it.
    """
    numbered = copy.copy(loader)
    which = "sampler" if loader.batch_sampler is None else "batch_sampler"
    sampler = NumberedSampler(getattr(loader, which), seeds)
    own = {which: sampler, "dataset": _PassedOn(loader.dataset), "collate_fn": _SeededFetch(loader), "_iterator": None}
    vars(numbered).update(own)
    return numbered, sampler
