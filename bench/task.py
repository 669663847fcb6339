"""Describes the work of one benchmark process. Imports nothing of the benchmark, so that every module can import it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

__all__ = ["Task"]


@dataclass(frozen=True)
class Task:
    """The work of one process. Travels as JSON."""

    part: str
    """A key of ``PARTS``."""
    name: str = ""
    """The contender, or the way to load."""
    size: int = 0
    batch: int = 1
    count: int = 1
    """Saves after the first; windows; repetitions: each part gives it its meaning."""
    threads: int = 1
    settle: float = 0.0
    target: str = ""
    result: str = ""
    fingerprint: str = ""
    """Fingerprint of the state that a load must give."""
    more: dict[str, Any] = field(default_factory=dict)
