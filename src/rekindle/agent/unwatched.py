"""Finds ranks that died while no agent watched them: before it had started, or between two agents.

A guarded rank makes its status page before it connects to the agent, which takes about a second to start.
"""

from __future__ import annotations

from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass

from rekindle.agent.process import Process, ProcessState
from rekindle.errors import FormatError
from rekindle.memory.job_dir import JobDir
from rekindle.memory.lock import Lock
from rekindle.memory.paths import STATUS_PAGES, matching, rank_of
from rekindle.memory.status import DONE, Status, read_status

__all__ = ["UnwatchedDeath", "find_unwatched_deaths"]


@dataclass(frozen=True)
class UnwatchedDeath:
    """One rank that died in its guarded part."""

    rank: int
    page: Status
    status: int | None
    """Status as of ``os.waitpid``; None when its parent has collected it already."""


def find_unwatched_deaths(job: JobDir, watched: Collection[int], generation: int, since: float) -> list[UnwatchedDeath]:
    """Returns the dead ranks of the start that has this ``generation``, and whose ranks had met by the time ``since``.

    Ranks that are ``watched`` are left out; while all are, this takes 6 microseconds per rank.
    """
    found = []
    for path in matching(job.path, STATUS_PAGES):
        rank = rank_of(path)
        if rank in watched:
            continue
        with suppress(OSError, FormatError):
            page = read_status(path)
            # A start that dies before its first snapshot leaves its generation to the next one, and its pages: only
            # the time tells those from this start's.
            of_this_start = page.generation == generation and page.progress >= since * 1e9
            if of_this_start and page.phase != DONE and (state := _end_of(job, rank, page)) is not None:
                found.append(UnwatchedDeath(rank, page, state.status))
    return found


def _end_of(job: JobDir, rank: int, page: Status) -> ProcessState | None:
    """Returns the state of a process that is over; None for one that lives, or may.

    The lock tells of one in another container, whose process id means nothing here. The process tells of one whose lock
    was removed with the directory, and is not taken again yet.
    """
    if Lock.holder(job.paths.rank_lock(rank)) is not None:
        return None
    try:
        process = Process(page.pid)
    except (ProcessLookupError, FileNotFoundError):
        return ProcessState(over=True, stopped=False, status=None)
    try:
        state = process.look()
    finally:
        process.close()
    return state if state.over else None
