"""Secures every step of torchtitan's trainer: ``RekindleCheckpointManager``."""

from __future__ import annotations

from rekindle.integrations.torchtitan.manager import RekindleCheckpointManager

__all__ = ["RekindleCheckpointManager"]
