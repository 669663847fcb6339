"""Makes a Checkpointer for all that an Accelerator has prepared: ``checkpointer``."""

from __future__ import annotations

from rekindle.integrations.accelerate.making import checkpointer

__all__ = ["checkpointer"]
