"""Looks into loaders: the parts that decide on an epoch's order, and the kinds that can be handled without fetching."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

__all__ = ["drop_workers", "generators_of", "keeps_workers", "is_indexed", "samples_per_step", "set_epoch"]


def _parts(loader: Any) -> list[Any]:
    """Returns the loader, its samplers and its dataset, each once."""
    batches = getattr(loader, "batch_sampler", None)
    found = [
        loader,
        getattr(loader, "sampler", None),
        batches,
        getattr(batches, "sampler", None),
        getattr(loader, "dataset", None),
    ]
    return list({id(part): part for part in found if part is not None}.values())


def generators_of(loader: Any) -> list[torch.Generator]:
    """Returns the generators that a loader and its parts have of their own."""
    found = [getattr(part, "generator", None) for part in _parts(loader)]
    return list({id(each): each for each in found if isinstance(each, torch.Generator)}.values())


def set_epoch(loader: Any, epoch: int) -> None:
    """Tells a loader the number of the epoch, or else its parts, as ``DistributedSampler`` needs it."""
    knowing = [part for part in _parts(loader) if callable(getattr(part, "set_epoch", None))]
    for part in knowing[:1] if knowing[:1] == [loader] else knowing:
        part.set_epoch(epoch)


def samples_per_step(loader: Any) -> int:
    """Returns how many samples all ranks take together while this one takes a batch, as far as the loader tells."""
    batches = getattr(loader, "batch_sampler", None)
    size = getattr(loader, "batch_size", None) or getattr(batches, "batch_size", None)
    shares = [getattr(part, name, None) for part in _parts(loader) for name in ("num_replicas", "num_processes")]
    ranks = next((share for share in shares if isinstance(share, int)), 1)
    return (size if isinstance(size, int) else 1) * ranks


def is_indexed(loader: Any) -> bool:
    """True for torch's own DataLoader of a dataset with indices: a sampler alone tells what each batch consists of."""
    return (
        isinstance(loader, DataLoader)
        and type(loader).__iter__ is DataLoader.__iter__
        and type(loader)._get_iterator is DataLoader._get_iterator
        and not isinstance(loader.dataset, IterableDataset)
    )


def keeps_workers(loader: Any) -> bool:
    """True if one epoch's workers go on to the next, once they are there."""
    return bool(getattr(loader, "persistent_workers", False) and getattr(loader, "num_workers", 0))


def drop_workers(loader: Any) -> None:
    """Has a loader begin its next epoch as its first one, with new workers."""
    if "_iterator" in getattr(loader, "__dict__", {}):
        loader._iterator = None
