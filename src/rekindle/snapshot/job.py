"""What a job is, for its agent: ``job.json``."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from rekindle.snapshot.fields import number, numbers, texts
from rekindle.snapshot.names import MOST_RANKS, root_of

__all__ = ["Job"]


@dataclass(frozen=True)
class Job:
    """What a trainer tells its agent, through ``job.json``."""

    root: str
    ranks: list[int]
    """Ranks on this node."""
    world: int
    keep: int
    keep_every: int | None
    idle_timeout: float
    """Seconds without a trainer after which the agent leaves, everything being durable."""
    drain_limit: int | None = None
    """Bytes per second that the drain of all ranks of this node may write; None for what storage takes."""

    @staticmethod
    def from_json(value: Any) -> Job:
        """Raises ValueError, TypeError or KeyError when it makes no sense."""
        world = number(value["world"], 1, MOST_RANKS)
        every, limit, idle = value["keep_every"], value.get("drain_limit"), value["idle_timeout"]
        if type(idle) not in (int, float) or not idle >= 0:
            raise ValueError("its idle_timeout is no time")
        (root,) = texts([value["root"]])
        if (not root.startswith(os.sep) and not isinstance(root_of(root), str)) or b"\0" in os.fsencode(root):
            raise ValueError("its root is neither an absolute path nor a URL")
        return Job(
            root=root,
            ranks=list(numbers(value["ranks"], MOST_RANKS, world - 1)),
            world=world,
            keep=number(value["keep"]),
            keep_every=None if every is None else number(every),
            idle_timeout=idle,
            drain_limit=None if limit is None else number(limit, 1),
        )
