"""Stands in for ``torch_nebula``: the same names, over ``rekindle.files``. See docs/torch_nebula.md.

Imports torch when a checkpoint is saved or loaded, and Lightning when one of its two classes is asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rekindle.provide.torch_nebula.checkpoint import (
    Checkpoint,
    get_checkpoint,
    get_latest_checkpoint,
    get_latest_checkpoint_path,
    list_checkpoints,
)
from rekindle.provide.torch_nebula.keeping import flush_persistence
from rekindle.provide.torch_nebula.settings import init

if TYPE_CHECKING:
    from rekindle.provide.torch_nebula.lightning import NebulaCallback, NebulaCheckpointIO

__all__ = [
    "Checkpoint",
    "NebulaCallback",
    "NebulaCheckpointIO",
    "flush_persistence",
    "get_checkpoint",
    "get_latest_checkpoint",
    "get_latest_checkpoint_path",
    "init",
    "list_checkpoints",
]


def __getattr__(name: str) -> Any:
    if name not in ("NebulaCallback", "NebulaCheckpointIO"):
        raise AttributeError(f"module 'torch_nebula', which Rekindle stands in for, has no attribute {name!r}")
    from rekindle.provide.torch_nebula import lightning  # noqa: PLC0415  brings Lightning

    return getattr(lightning, name)
