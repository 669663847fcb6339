"""Tells which ranks take part, and lets them agree: on a checkpoint that they write, and on the newest one."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rekindle.common.environ import env_count
from rekindle.errors import BusyError, UsageError

__all__ = ["agree", "newest", "rank_and_world", "was_asked"]

_PREFIX = "rekindle/torch_nebula"


def _distributed() -> Any:
    """Returns ``torch.distributed`` where this process has initialised it, else None."""
    module: Any = sys.modules.get("torch.distributed")
    return module if module is not None and module.is_available() and module.is_initialized() else None


def rank_and_world() -> tuple[int, int]:
    """Returns this process's rank and the number of ranks."""
    distributed = _distributed()
    if distributed is not None:
        return distributed.get_rank(), distributed.get_world_size()
    return int(os.environ.get("RANK") or 0), env_count("WORLD_SIZE")


def agree(key: str, value: str) -> str:
    """Returns the value of the rank that asked first for this key. Waits for no rank.

    Raises UsageError for several ranks that have not initialised ``torch.distributed``, BusyError where its store does
    not answer.
    """
    if rank_and_world()[1] == 1:
        return value
    with _store() as store:
        answer: bytes = store.compare_set(f"{_PREFIX}/{key}", "", f"={value}")  # an empty one would count as none
        return answer.decode()[1:]


def was_asked(key: str) -> bool:
    """True if another rank, or this one, has asked for this key; False of a single rank. Raises as ``agree``."""
    if rank_and_world()[1] == 1:
        return False
    with _store() as store:
        return bool(store.check([f"{_PREFIX}/{key}"]))


def newest(key: str, version: int = 0) -> int:
    """Raises a number that all ranks share to at least ``version``, and returns it. Raises as ``agree``."""
    if rank_and_world()[1] == 1:
        return version
    with _store() as store:
        name = f"{_PREFIX}/newest/{key}"
        known = int(store.compare_set(name, "", str(version)))
        while known < version:
            known = int(store.compare_set(name, str(known), str(version)))
        return known


@contextmanager
def _store() -> Iterator[Any]:
    """Gives the store of ``torch.distributed``, and turns its errors into BusyError."""
    distributed = _distributed()
    if distributed is None:
        raise UsageError(
            f"torch_nebula: there are {rank_and_world()[1]} ranks, and torch.distributed is not initialised: call "
            "init_process_group before the first checkpoint, so that they can agree on it"
        )
    try:
        yield distributed.distributed_c10d._get_default_store()
    except RuntimeError as error:
        raise BusyError(f"torch_nebula: the ranks can't agree on a checkpoint, has rank 0 ended? {error}") from error
