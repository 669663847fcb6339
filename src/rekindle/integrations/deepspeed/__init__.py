"""Keeps DeepSpeed's checkpoints in memory first: ``attach``."""

from __future__ import annotations

from rekindle.integrations.deepspeed.attaching import attach
from rekindle.integrations.deepspeed.engine import RekindleCheckpointEngine

__all__ = ["RekindleCheckpointEngine", "attach"]
