"""Defines the record of a job that its trainers write for its agent, ``job.json``."""

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
    """Describes a job to its agent. Each trainer writes it into ``job.json``."""

    root: str
    """Path or URL of its checkpoints."""
    ranks: list[int]
    """Ranks on this node."""
    world: int
    """Number of ranks of the job."""
    keep: int | None
    """Number of newest checkpoints that stay on storage. None, if ``keep_every`` is None too, for retention by age."""
    keep_every: int | None
    """Interval in steps of checkpoints that stay on storage for ever."""
    idle_timeout: float
    """Seconds without a trainer after which the agent ends, once everything is durable."""
    drain_limit: int | None = None
    """Most bytes per second that this node's drain writes; None for no limit."""
    persist_seconds: float | None = None
    """Least seconds between drains of snapshots that were not asked for on storage. None: such ones are not drained."""
    start: str = ""
    """Id of the incarnation that trains now; empty if an earlier version of Rekindle wrote the record."""
    host: str = ""
    """Address on which the agent listens to those of other nodes; empty for a job on one node."""
    peer_every: int | str | None = "auto"
    """Interval in steps of those that nodes copy from each other. "auto": one after the other. None: none."""
    peer_limit: int | None = None
    """Most bytes per second that this node copies from another one; None for no limit."""
    patience: float = 10.0
    """Seconds without a sign after which another node is lost."""
    headroom: int = 0
    """Bytes of the memory store that copies leave free."""
    persist_budget: float | None = None
    """Share of training time that drains may take, if the agent is to choose their pause, from ``persist_seconds`` on.
    None where it does not."""

    def to_json(self) -> dict[str, Any]:
        """Returns the record as JSON. ``keep`` is a number in it: an older agent, if it serves the job, needs one."""
        by_age = self.keep is None and self.keep_every is None
        return {**asdict(self), "keep": 2 if self.keep is None else self.keep, "keep_by_age": by_age}

    @staticmethod
    def from_json(value: Any) -> JobInfo:
        """Reads the record from JSON. Raises ValueError, TypeError or KeyError when a field is missing or malformed."""
        world = check_integer(value["world"], 1, MAX_RANKS)
        every, limit, idle = value["keep_every"], value.get("drain_limit"), value["idle_timeout"]
        rest, patience = value.get("persist_seconds"), value.get("patience", 10.0)
        if any(
            type(time) not in (int, float) or not 0 <= time < math.inf
            for time in (idle, 0 if rest is None else rest, patience)
        ):
            raise ValueError("its idle_timeout, persist_seconds or patience is not a number of seconds")
        budget = value.get("persist_budget")
        if budget is not None and (type(budget) is not float or not 0 < budget < 1):
            raise ValueError("its persist_budget is not a share")
        copied, copy_limit = value.get("peer_every", "auto"), value.get("peer_limit")
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
            host=check_texts([value.get("host", "")])[0],
            peer_every=copied if copied in (None, "auto") else check_integer(copied, 1),
            peer_limit=None if copy_limit is None else check_integer(copy_limit, 1),
            patience=patience,
            headroom=check_integer(value.get("headroom", 0)),
            persist_budget=budget,
        )
