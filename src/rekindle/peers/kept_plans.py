"""Reads the plans of local states that another node has sent of its ranks: they say which bytes others hold too."""

from __future__ import annotations

import os
import time
from contextlib import suppress

from rekindle.errors import FormatError
from rekindle.format.receipt import Receipt, parse_stamp, read_file
from rekindle.memory.job_dir import JobDir
from rekindle.memory.local_state import LocalStatePlan, decode_local_state_plan
from rekindle.peers.unique import is_planned

__all__ = ["KeptPlans"]

_COMES_WITHIN = 2.0
"""Seconds for which a plan that knows a shard's chunks is awaited. It comes with the first step that follows it.
Without it everything is copied, which costs a DDP job its whole state, once."""


class KeptPlans:
    """The plans that this node keeps for other nodes' ranks. Each is decoded once. For one thread."""

    def __init__(self, job: JobDir, start: str) -> None:
        """``start`` is the id of the incarnation whose plans count."""
        self._paths, self._start = job.others, start
        self._decoded: dict[int, tuple[tuple[int, int], LocalStatePlan | None]] = {}
        """By rank: inode and time of the file, and the plan in it; None for one of another start."""
        self._missed: dict[tuple[int, str], float] = {}
        """Times at which a rank's layout was first seen that no plan knew, by the checksum of its header."""

    def newest(self, rank: int) -> LocalStatePlan | None:
        """Returns the plan of a rank; None if there is none, or it is damaged."""
        path = self._paths.local_state_plan(rank)
        with suppress(OSError, FormatError):
            info = os.stat(path)
            mark = info.st_ino, info.st_mtime_ns
            if rank not in self._decoded or self._decoded[rank][0] != mark:
                raw = read_file(path)
                counts = parse_stamp(raw, path).incarnation.id == self._start
                self._decoded[rank] = mark, decode_local_state_plan(raw, str(path)) if counts else None
            return self._decoded[rank][1]
        return None

    def may_come(self, receipt: Receipt) -> bool:
        """True for a while after a shard was first seen with chunks that its rank's plan does not know."""
        if is_planned(receipt.layout, self.newest(receipt.stamp.rank)):
            return False
        now, key = time.monotonic(), (receipt.stamp.rank, receipt.header_checksum)
        return now - self._missed.setdefault(key, now) < _COMES_WITHIN
