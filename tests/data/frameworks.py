"""Trains over loaders of torchdata and of Hugging Face: python -m tests.data.frameworks KIND EXACT OUT [ROOT] [DIE]."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import torch
from torch.utils.data import DataLoader, TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from rekindle.data import Resumable
from tests.data.job import Job, train
from tests.data.kinds import SIZE, TWO, Indexed


def _rows() -> datasets.Dataset:
    return datasets.Dataset.from_dict({"x": [[float(n), 1.0, 2.0, 3.0] for n in range(SIZE)]}).with_format("torch")


def _stream() -> datasets.IterableDataset:
    return _rows().to_iterable_dataset(num_shards=2).shuffle(seed=1, buffer_size=5)


def _numbers() -> TensorDataset:
    return TensorDataset(torch.arange(4.0 * SIZE).reshape(SIZE, 4))


LOADERS: dict[str, Callable[[], Any]] = {
    "stateful": lambda: StatefulDataLoader(Indexed(), batch_size=4, shuffle=True),
    "stateful-workers": lambda: StatefulDataLoader(Indexed(), batch_size=4, shuffle=True, **TWO),
    "stream": _stream,
    "stream-loader": lambda: DataLoader(_stream(), batch_size=4),
    "stream-workers": lambda: DataLoader(_stream(), batch_size=4, **TWO),
    "rows": lambda: DataLoader(_rows(), batch_size=4, shuffle=True),
}
BARE: dict[str, Callable[[], Any]] = {
    "bare": lambda: StatefulDataLoader(_numbers(), batch_size=4, shuffle=True),
    "bare-workers": lambda: StatefulDataLoader(_numbers(), batch_size=4, shuffle=True, **TWO),
    "bare-stream": lambda: _rows().to_iterable_dataset(num_shards=2).repeat(2),
}


def main(kind: str, exact: Any, out: str, root: str = "", die: str = "0") -> None:
    job = Job(Path(out), steps=24, root=Path(root) if root else None, die=(int(die), "updated") if int(die) else None)
    train(job, BARE[kind] if kind in BARE else lambda: Resumable(LOADERS[kind](), exact))


if __name__ == "__main__":
    main(*sys.argv[1:])
