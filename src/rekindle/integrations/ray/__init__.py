"""Adapts a Checkpointer to the train function of Ray Train: ``root``, ``notices``, ``leave`` and ``report``."""

from __future__ import annotations

from rekindle.integrations.ray.preemption import leave, notices
from rekindle.integrations.ray.reporting import report
from rekindle.integrations.ray.roots import root

__all__ = ["leave", "notices", "report", "root"]
