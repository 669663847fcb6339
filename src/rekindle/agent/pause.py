"""Chooses the time between two drains that nobody asked for, where it is to be the one with the least waste."""

from __future__ import annotations

import logging
import math
from contextlib import suppress

from rekindle.common.durations import describe_seconds
from rekindle.common.waste import best_interval
from rekindle.errors import RekindleError
from rekindle.memory.history import history_of
from rekindle.memory.incident import RUNNING, Incident
from rekindle.memory.incidents import describe_stretch, read_incidents
from rekindle.memory.job import JobInfo
from rekindle.memory.job_dir import JobDir
from rekindle.memory.prices import read_pause, read_prices, write_pause
from rekindle.storage.incidents import load_incidents
from rekindle.storage.open import open_store

__all__ = ["Pauses", "pause_of"]

log = logging.getLogger("rekindle.agent")

_STICKY = 0.8
"""A pause is kept until another one differs by more than this factor: prices are never measured twice alike."""


def pause_of(job: JobDir, info: JobInfo) -> float:
    """Returns the least seconds between two drains that nobody asked for. Infinite if there are to be none."""
    if info.persist_seconds is None:
        return math.inf
    chosen = read_pause(job) if info.persist_budget is not None else None
    return info.persist_seconds if chosen is None else chosen


class Pauses:
    """Chooses the pause of one job, for the process that drains, and notes it for others and for the next one."""

    def __init__(self, job: JobDir) -> None:
        self._job = job
        self._stored: list[Incident] | None = None
        """Records that storage had when they were first wanted; None before. Memory has those that came later."""

    def choose(self, info: JobInfo) -> None:
        """Chooses anew by what is known now, after a drain. Nothing changes while no drain has a price.

        Raises OSError where memory takes no note.
        """
        prices = read_prices(self._job, info.start) if info.persist_budget is not None else None
        if prices is None or prices.drain_cost is None or info.persist_budget is None:
            return
        history = history_of(self._records(info))
        between = history.between(history.to_storage)
        pause = max(best_interval(prices.drain_cost, between), prices.drain_cost / info.persist_budget)
        before = pause_of(self._job, info)
        if before == pause or (pause and _STICKY <= before / pause <= 1 / _STICKY):
            return
        log.info(
            "storage gets a checkpoint every %s from now on, was %s: a write takes %s of training, and the job has had "
            "to go back to storage %d times in %s",
            *(describe_seconds(pause), describe_seconds(before), describe_seconds(prices.drain_cost)),
            *(history.to_storage, describe_seconds(history.seconds)),
        )
        write_pause(self._job, pause)

    def _records(self, info: JobInfo) -> list[Incident]:
        """Returns all records, each once. Storage that doesn't tell its own leaves those of memory."""
        if self._stored is None:
            with suppress(OSError, RekindleError):
                self._stored = load_incidents(open_store(info.root))[0]
        records = {one.name: one for one in [*(self._stored or ()), *read_incidents(self._job)]}
        running = describe_stretch(self._job, RUNNING)
        return [*records.values(), *([running] if running is not None else [])]
