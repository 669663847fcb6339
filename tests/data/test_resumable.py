"""A loader comes back to its place: batches, and what training draws, are those of an unbroken run."""

from __future__ import annotations

import itertools
import logging
from multiprocessing import Value
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler, get_worker_info

import rekindle
from rekindle.data import Resumable
from tests.data.kinds import KINDS, SIZE, TWO, Indexed, resumable, seed_all, unbroken_and_broken

MODES = ["replay", "seeded"]


@pytest.mark.parametrize(("kind", "exact"), list(itertools.product(KINDS, MODES)))
def test_training_goes_on_in_the_middle_of_the_second_epoch(kind: str, exact: Any) -> None:
    """Kinds that docs/data.md calls inexact are told to be, so that the page does not promise too little either."""
    unbroken, broken = unbroken_and_broken(resumable(kind, exact), steps=9, stop=7)
    assert (broken == unbroken) is getattr(KINDS[kind], exact)


@pytest.mark.campaign
@pytest.mark.parametrize("stop", [1, 4, 5, 6, 10])
@pytest.mark.parametrize("exact", MODES)
def test_training_goes_on_from_any_batch(exact: Any, stop: int) -> None:
    """Also from the last one of an epoch, and from the first epoch, in which persistent workers are exact too."""
    for kind, row in KINDS.items():
        if getattr(row, exact) or (stop < 5 and "persistent" in kind):
            unbroken, broken = unbroken_and_broken(resumable(kind, exact), steps=12, stop=stop)
            assert broken == unbroken, kind


@pytest.mark.parametrize(("kind", "exact"), [("generator", "replay"), ("indexed", "seeded"), ("persistent", "seeded")])
def test_training_goes_on_between_two_epochs(kind: str, exact: Any) -> None:
    """Where steps are epochs. The loader's own generator may have served others meanwhile."""
    unbroken, broken = unbroken_and_broken(resumable(kind, exact), steps=9, stop=5, between=True)
    assert broken == unbroken


def test_persistent_workers_keep_their_order() -> None:
    unbroken, broken = unbroken_and_broken(resumable("persistent", "replay"), steps=9, stop=7)
    for (batch, *draws), (other, *other_draws) in zip(unbroken, broken, strict=True):
        assert [row[0] for row in batch] == [row[0] for row in other] and draws == other_draws


@pytest.mark.parametrize("exact", MODES)
def test_a_loader_gives_what_it_gives_by_itself(exact: Any) -> None:
    """In every bit by replay, and the same samples with seeds."""
    seed_all(5)
    alone = [batch.tolist() for batch in KINDS["indexed"].make()]
    seed_all(5)
    ours = [batch.tolist() for batch in Resumable(KINDS["indexed"].make(), exact)]
    assert [[row[0] for row in batch] for batch in ours] == [[row[0] for row in batch] for batch in alone]
    assert (ours == alone) is (exact == "replay")


def workers_of(count: int) -> dict[str, Any]:
    return TWO if count else {}


class Counting(Indexed):
    """Counts what is fetched, by whichever process."""

    def __init__(self) -> None:
        self.fetched = Value("i", 0)

    def __getitem__(self, number: int) -> torch.Tensor:
        with self.fetched:
            self.fetched.value += 1
        return super().__getitem__(number)


@pytest.mark.parametrize(
    ("workers", "exact", "fetched"), [(0, "replay", 4), (0, "seeded", 4), (2, "seeded", 4), (2, "replay", SIZE)]
)
def test_batches_are_fetched_again_only_where_workers_may_draw(workers: int, exact: Any, fetched: int) -> None:
    data = Resumable(DataLoader(Indexed(), batch_size=4, shuffle=True, **workers_of(workers)), exact)
    first = iter(data)
    state = [data.state_dict() for _ in range(4) if next(first) is not None][-1]
    dataset = Counting()
    again = Resumable(DataLoader(dataset, batch_size=4, shuffle=True, **workers_of(workers)), exact)
    again.load_state_dict(state)
    assert len(list(again)) == 1
    assert dataset.fetched.value == fetched


def test_an_epoch_that_is_left_is_gone_on_with() -> None:
    data = Resumable(range(5))
    assert list(itertools.islice(data, 2)) == [0, 1]
    assert (data.epoch, data.batches, list(data)) == (0, 2, [2, 3, 4])
    assert (data.epoch, data.batches, list(data)) == (1, 0, [0, 1, 2, 3, 4])


class Failing(Indexed):
    """Fails once at its third batch."""

    failed = False

    def __getitem__(self, number: int) -> torch.Tensor:
        if number == 8 and not self.failed:
            self.failed = True
            raise OSError("storage is away")
        return super().__getitem__(number)


def test_a_batch_whose_fetching_failed_comes_again() -> None:
    seed_all(0)
    data = Resumable(DataLoader(Failing(), batch_size=4))
    seen: list[float] = []
    with pytest.raises(OSError, match="storage is away"):
        for batch in data:
            seen += batch[:, 0].tolist()
    assert data.batches == 2
    for batch in data:
        seen += batch[:, 0].tolist()
    assert seen == list(range(SIZE))


def test_samplers_are_told_the_epoch() -> None:
    sampler = DistributedSampler(Indexed(), num_replicas=1, rank=0)
    data = Resumable(DataLoader(Indexed(), batch_size=20, sampler=sampler))
    orders = [batch[:, 0].tolist() for _ in range(2) for batch in data]
    sampler.set_epoch(1)
    assert orders[1] == list(sampler) and orders[0] != orders[1]


def test_another_batch_size_counts_samples(caplog: pytest.LogCaptureFixture) -> None:
    data = Resumable(DataLoader(range(24), batch_size=4))
    assert next(iter(data)).tolist() == [0, 1, 2, 3]
    again = Resumable(DataLoader(range(24), batch_size=2))
    with caplog.at_level(logging.WARNING, "rekindle"):
        again.load_state_dict(data.state_dict())
    assert again.batches == 2 and "took 4 samples at a time, now 2" in caplog.text
    assert next(iter(again)).tolist() == [4, 5]


def test_a_shorter_dataset_is_refused() -> None:
    data = Resumable(range(8))
    assert len(list(itertools.islice(data, 6))) == 6
    again = Resumable(range(3))
    again.load_state_dict(data.state_dict())
    with pytest.raises(rekindle.UsageError, match="6 batches of epoch 0 are done"):
        next(iter(again))


def test_what_has_no_place_is_refused(root: Path, memory: Path) -> None:
    with pytest.raises(rekindle.UsageError, match="'replay' or 'seeded'"):
        Resumable([], exact="always")  # type: ignore[arg-type]
    with pytest.raises(rekindle.UsageError, match="list_iterator can't be iterated over again"):
        Resumable(iter([1]))
    with pytest.raises(rekindle.UsageError, match=r"is a DataLoader, which.*rekindle.data.Resumable\(loader\)"):
        rekindle.Checkpointer(root, {"data": DataLoader(range(3))})


def test_a_resumable_is_its_loader() -> None:
    data = rekindle.data.Resumable(DataLoader(range(6), batch_size=2))
    assert len(data) == 3 and data.batch_size == 2
    with pytest.raises(AttributeError, match="no_such_thing"):
        _ = data.no_such_thing


def _set_size(worker: int) -> None:
    info = get_worker_info()
    assert info is not None and info.dataset.size == 0
    info.dataset.size = 10


def test_a_worker_can_reach_the_dataset_under_seeds() -> None:
    loader = DataLoader(Sized(), batch_size=2, worker_init_fn=_set_size, **TWO)
    assert [batch.tolist() for batch in Resumable(loader, "seeded")] == [[10, 10], [10, 10]]


class Sized(Indexed):
    """A dataset whose content a worker sets."""

    size = 0

    def __len__(self) -> int:
        return 4

    def __getitem__(self, number: int) -> torch.Tensor:
        return torch.tensor(self.size)
