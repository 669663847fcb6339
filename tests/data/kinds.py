"""Loaders of every kind, and training that sees what they give: unbroken, or broken off and gone on with.

Nothing here knows pytest: programs in other environments use it too.
"""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy
import torch
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    WeightedRandomSampler,
    get_worker_info,
)

from rekindle.data import Resumable
from rekindle.state.rng import RngState

SIZE = 20
"""Samples of each dataset: five batches of four."""


def sample(number: int) -> torch.Tensor:
    """A sample with random augmentation, from every generator that a dataset may draw from."""
    return torch.tensor([number, torch.rand(()).item(), random.random(), numpy.random.rand()], dtype=torch.float64)


class Indexed(Dataset[torch.Tensor]):
    """A dataset with indices."""

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, number: int) -> torch.Tensor:
        return sample(number)


class Stream(IterableDataset[torch.Tensor]):
    """A dataset without, divided among workers, with a shuffle buffer that draws from the process's generators."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        info = get_worker_info()
        first, step = (info.id, info.num_workers) if info is not None else (0, 1)
        buffer: list[int] = []
        for number in range(first, SIZE, step):
            buffer.append(number)
            if len(buffer) == 5:
                yield sample(buffer.pop(random.randrange(5)))
        while buffer:
            yield sample(buffer.pop(random.randrange(len(buffer))))


def _indexed(**options: Any) -> DataLoader[torch.Tensor]:
    return DataLoader(Indexed(), **{"batch_size": 4} | options)


def _stream(**options: Any) -> DataLoader[torch.Tensor]:
    return DataLoader(Stream(), batch_size=4, **options)


TWO: Any = {"num_workers": 2, "multiprocessing_context": "fork"}
"""Workers, at the least cost."""


def _with_replacement() -> DataLoader[torch.Tensor]:
    return _indexed(sampler=RandomSampler(range(SIZE), replacement=True, generator=torch.Generator().manual_seed(3)))


class Kind(NamedTuple):
    """A way to make a loader; says if training goes on exactly, by replay and with seeds."""

    make: Callable[[], Any]
    replay: bool = True
    seeded: bool = True


KINDS = {
    "list": Kind(lambda: [torch.tensor([n]) for n in range(5)]),
    "indexed": Kind(lambda: _indexed(shuffle=True)),
    "generator": Kind(lambda: _indexed(shuffle=True, generator=torch.Generator().manual_seed(7))),
    "weighted": Kind(lambda: _indexed(sampler=WeightedRandomSampler([1.0] * SIZE, SIZE))),
    "replacement": Kind(_with_replacement),
    "single": Kind(lambda: _indexed(shuffle=True, batch_size=None)),
    "distributed": Kind(lambda: _indexed(batch_size=2, sampler=DistributedSampler(Indexed(), num_replicas=2, rank=1))),
    "workers": Kind(lambda: _indexed(shuffle=True, **TWO)),
    "persistent": Kind(lambda: _indexed(shuffle=True, **TWO, persistent_workers=True), replay=False),
    "stream": Kind(_stream, replay=False),
    "stream-workers": Kind(lambda: _stream(**TWO)),
    "stream-persistent": Kind(lambda: _stream(**TWO, persistent_workers=True), replay=False, seeded=False),
}


def seed_all(seed: int) -> None:
    random.seed(seed)
    numpy.random.seed(seed)
    torch.manual_seed(seed)


def _see(data: Any, seen: list[Any], steps: int, stop: int = -1, between: bool = False) -> bytes:
    """Trains on epoch after epoch until ``steps`` are seen. Returns the state after ``stop`` steps, as it is saved.

    That is in the loop's body or, with ``between``, after the loop of an epoch and a look at other data.
    """
    saved = b""
    while len(seen) < steps:
        for batch in data:
            content = batch.tolist() if isinstance(batch, torch.Tensor) else repr(batch)
            seen.append((content, torch.rand(()).item(), random.random(), numpy.random.rand()))
            if len(seen) == stop and not between:
                saved = pickle.dumps((data.state_dict(), RngState().state_dict()))
            if len(seen) == steps:
                break
        if between and len(seen) == stop:
            if getattr(data, "generator", None) is not None:
                torch.rand((), generator=data.generator)
            saved = pickle.dumps((data.state_dict(), RngState().state_dict()))
    return saved


def unbroken_and_broken(
    make: Callable[[], Any], steps: int, stop: int, between: bool = False
) -> tuple[list[Any], list[Any]]:
    """Returns the steps after ``stop``, each as batch and training's own draws: without a break, and after one."""
    seed_all(0)
    unbroken: list[Any] = []
    state, generators = pickle.loads(_see(make(), unbroken, steps, stop, between))
    seed_all(99)
    data = make()
    data.load_state_dict(state)
    RngState().load_state_dict(generators)
    broken: list[Any] = []
    _see(data, broken, steps - stop)
    return unbroken[stop:], broken


def resumable(kind: str, exact: Any) -> Callable[[], Resumable]:
    return lambda: Resumable(KINDS[kind].make(), exact)
