"""Reports metrics to Ray Train, and with them which checkpoint is on storage.

Ray copies a checkpoint that is reported to it, or wants it in its own directory and removes it there as ``num_to_keep``
says. So it gets a pointer, a directory with one small file, and the checkpoint stays where it is.
"""

from __future__ import annotations

import importlib
import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import rekindle
from rekindle.common.timeouts import with_timeout
from rekindle.errors import RekindleError
from rekindle.format.names import Root
from rekindle.integrations.ray.surroundings import is_local, warn_of_cluster, warn_of_objects
from rekindle.storage.catalog import list_checkpoints
from rekindle.storage.open import open_store

__all__ = ["POINTER", "report"]

POINTER = "rekindle.json"
"""File of a reported checkpoint: an object with the texts ``root`` and the number ``step``."""
_LOOK = 10.0
"""Seconds in which storage says what it has. The next report looks again."""

_reported: WeakKeyDictionary[rekindle.Checkpointer, int] = WeakKeyDictionary()
"""The newest step that each Checkpointer's reports have named; 0 if they named none."""


def report(ckpt: rekindle.Checkpointer, metrics: Mapping[str, Any]) -> None:
    """Reports ``metrics`` to Ray Train, with a pointer to the newest checkpoint on storage if that is a new one.

    Takes the place of ``ray.train.report(metrics)``, which it calls: to be called in the train function, on all workers
    equally often. It doesn't wait for storage. After ``ckpt.close()`` the pointer names the last step. Ray's
    ``get_checkpoint()`` and ``Result.checkpoint`` return it; ``ckpt.restore()`` needs none. Local mode has no pointers.
    """
    warn_of_cluster()
    train = importlib.import_module("ray.train")
    context = train.get_context()
    if is_local(context):
        train.report(dict(metrics))
        return
    if ckpt not in _reported and context.get_local_rank() == 0:
        warn_of_objects(ckpt.metrics, context.get_local_world_size())
    before = _reported.setdefault(ckpt, 0)
    step = _newest_stored(ckpt.root) if context.get_world_rank() == 0 else 0
    if step in (0, before):
        train.report(dict(metrics))
        return
    with tempfile.TemporaryDirectory(prefix="rekindle-") as place:
        (Path(place) / POINTER).write_text(json.dumps({"root": str(ckpt.root), "step": step}), encoding="utf-8")
        train.report(dict(metrics), checkpoint=train.Checkpoint.from_directory(place))
    _reported[ckpt] = step


def _newest_stored(root: Root) -> int:
    """Returns the newest step on storage; 0 if there is none, or storage doesn't say."""
    try:
        found = with_timeout(_LOOK, root, lambda: list_checkpoints(None, open_store(root), ()))
    except (OSError, RekindleError):
        return 0
    return found[0].step if found else 0
