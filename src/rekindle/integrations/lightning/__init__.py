"""Secures every step of Lightning's Trainer: ``RekindleCallback``; and its checkpoints: ``RekindleCheckpointIO``."""

from __future__ import annotations

from rekindle.integrations.lightning.callback import RekindleCallback
from rekindle.integrations.lightning.io import RekindleCheckpointIO

__all__ = ["RekindleCallback", "RekindleCheckpointIO"]
