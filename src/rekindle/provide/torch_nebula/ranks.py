"""Tells which ranks take part, and lets them agree: on the number of a checkpoint, and on the newest one."""

from __future__ import annotations

import os
import sys
from typing import Any

from rekindle.common.environ import env_count
from rekindle.errors import BusyError, UsageError

__all__ = ["agree", "rank_and_world"]


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
    world = rank_and_world()[1]
    if world == 1:
        return value
    distributed = _distributed()
    if distributed is None:
        raise UsageError(
            f"torch_nebula: there are {world} ranks, and torch.distributed is not initialised: call init_process_group "
            "before the first checkpoint, so that they can agree on it"
        )
    store = distributed.distributed_c10d._get_default_store()
    try:
        answer: bytes = store.compare_set(f"rekindle/torch_nebula/{key}", "", value)
    except RuntimeError as error:
        raise BusyError(f"torch_nebula: the ranks can't agree on a checkpoint, has rank 0 ended? {error}") from error
    return answer.decode()
