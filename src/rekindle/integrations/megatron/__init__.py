"""Secures every step of a training with Megatron-core, and keeps its checkpoints in memory first."""

from __future__ import annotations

from rekindle.integrations.megatron.state import MegatronState
from rekindle.integrations.megatron.strategies import install

__all__ = ["MegatronState", "install"]
