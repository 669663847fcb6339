"""What a job is, for its agent: ``job.json``."""

from __future__ import annotations

import math
import os
from dataclasses import asdict, dataclass
from typing import Any

from rekindle.format.fields import check_integer, check_integers, check_texts
from rekindle.format.names import MAX_RANKS, canonical_root

__all__ = ["JobInfo"]


@dataclass(frozen=True)
class JobInfo:
    """What a trainer tells its agent, through ``job.json``."""

    root: str
    ranks: list[int]
    """Ranks on this node."""
    world: int
    keep: int | None
    """Newest checkpoints that stay on storage; None, without ``keep_every`` too, for retention by age."""
    keep_every: int | None
    idle_timeout: float
    """Seconds without a trainer after which the agent leaves, everything being durable."""
    drain_limit: int | None = None
    """Bytes per second that the drain of all ranks of this node may write; None for what storage takes."""

    persist_seconds: float | None = None
    """Snapshots that nobody asked for on storage go there too, at most so often; None where none does."""
    start: str = ""
    """Id of the incarnation that trains now; empty where an earlier Rekindle does."""

    def to_json(self) -> dict[str, Any]:
        """``keep`` stays a number in it: an agent of an older version, which may still serve the job, wants one."""
        by_age = self.keep is None and self.keep_every is None
        return {**asdict(self), "keep": 2 if self.keep is None else self.keep, "keep_by_age": by_age}

    @staticmethod
    def from_json(value: Any) -> JobInfo:
        """Raises ValueError, TypeError or KeyError when it makes no sense."""
        world = check_integer(value["world"], 1, MAX_RANKS)
        every, limit, idle = value["keep_every"], value.get("drain_limit"), value["idle_timeout"]
        rest = value.get("persist_seconds")
        if any(
            type(time) not in (int, float) or not 0 <= time < math.inf for time in (idle, 0 if rest is None else rest)
        ):
            raise ValueError("its idle_timeout or persist_seconds is no time")
        (root,) = check_texts([value["root"]])
        if (not root.startswith(os.sep) and not isinstance(canonical_root(root), str)) or b"\0" in os.fsencode(root):
            raise ValueError("its root is neither an absolute path nor a URL")
        return JobInfo(
            root=root,
            ranks=list(check_integers(value["ranks"], MAX_RANKS, world - 1)),
            world=world,
            keep=None if value.get("keep_by_age") else check_integer(value["keep"]),
            keep_every=None if every is None else check_integer(every),
            idle_timeout=idle,
            drain_limit=None if limit is None else check_integer(limit, 1),
            persist_seconds=rest,
            start=check_texts([value.get("start", "")])[0],
        )
