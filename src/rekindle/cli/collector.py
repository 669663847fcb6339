"""Turns the records of this node's jobs into metrics for Prometheus.

All is read from memory at each scrape, by the functions that ``status`` and ``incidents`` use. No agent is asked, and
no storage: a scrape takes milliseconds, whatever has failed.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
    SummaryMetricFamily,
)
from prometheus_client.registry import Collector

from rekindle.cli.alarms import KINDS
from rekindle.cli.goodput import add_up
from rekindle.cli.incidents import find_incidents
from rekindle.cli.operations import job_status
from rekindle.errors import RekindleError
from rekindle.format.lineage import drop_superseded
from rekindle.memory.costs import BOUNDS, Costs, Histogram, rank_costs
from rekindle.memory.fault import CAUSES
from rekindle.memory.incident import MOMENTS, RUNNING, Incident
from rekindle.memory.incidents import read_start
from rekindle.memory.job_dir import JobDir
from rekindle.memory.notes import durable_at
from rekindle.storage.catalog import StoredCopy, find_copies
from rekindle.storage.listing import committed_at, jobs_in_memory

__all__ = ["JobCollector"]

log = logging.getLogger("rekindle")

_OF_RANKS: tuple[tuple[str, str, str], ...] = (
    ("step", "Newest completed step.", "step"),
    ("snapshot_every_steps", "Steps between snapshots, as it is now.", "snapshot_every"),
    ("restored_step", "Step that the newest start went on from.", "restored_step"),
    ("restore_seconds", "Time that this restore took.", "restore_seconds"),
)
_COUNTED: tuple[tuple[str, str, str], ...] = (
    ("steps", "Steps completed since the rank's start.", "steps"),
    ("saves", "Steps saved since the rank's start.", "saves"),
    ("direct_saves", "Saves that went straight to storage.", "direct"),
    ("left_out_steps", "Steps without a snapshot because memory for it was being made.", "left_out"),
    ("snapshot_bytes", "Bytes saved.", "snapshot_bytes"),
    (
        "snapshot_seconds",
        "Time from the begin of each snapshot to its commit, beside training or not.",
        "snapshot_seconds",
    ),
)
_FAILURES = {"save": "failed", "memory": "memory_lost", "agent": "agent_lost"}
_DRAINED: tuple[tuple[str, str, str], ...] = (
    ("drained_checkpoints", "Checkpoints carried to storage since the agent's start.", "drained"),
    ("drain_bytes", "Bytes that storage has taken since the agent's start.", "nbytes"),
    ("drain_seconds", "Time spent writing to storage since the agent's start.", "busy"),
    ("drain_failures", "Attempts that storage refused since the agent's start.", "failures"),
)


@dataclass
class _Reading:
    """All that one scrape reads of one job."""

    root: str
    status: dict[str, Any]
    costs: dict[int, Costs]
    incidents: list[Incident]
    newest: dict[str, tuple[int, float | None]] = field(default_factory=dict)
    """By place: the newest checkpoint there, and the time since which it is there, in seconds since 1970."""
    started: float | None = None
    """Time at which the newest start's ranks had met."""


class JobCollector(Collector):
    """Reads all jobs of a memory store. For one thread at a time."""

    def __init__(self, base: Path) -> None:
        self._base = base
        self._seen: dict[Path, dict[str, Incident]] = {}
        """Records of incidents by job and name: memory keeps the newest ones only, and a counter never goes back."""
        self._unreadable: dict[Path, str] = {}

    def collect(self) -> Iterable[Metric]:
        """Yields the metrics of all jobs."""
        readings, unreadable = [], {}
        for job in jobs_in_memory(self._base):
            try:
                readings.append(self._read(job))
            except FileNotFoundError:  # it has just ended
                continue
            except (OSError, RekindleError) as error:
                unreadable[job.path] = str(error)
                if self._unreadable.get(job.path) != str(error):
                    log.warning("%s: has no metrics, as it can't be read: %s", job.path, error)
        self._unreadable = unreadable
        self._seen = {path: seen for path, seen in self._seen.items() if path.is_dir()}
        yield InfoMetricFamily("rekindle_build", "Version of Rekindle.", value={"version": version("rekindle")})
        yield GaugeMetricFamily("rekindle_unreadable_jobs", "Jobs whose records are damaged.", value=len(unreadable))
        yield from _of_ranks(readings)
        yield from _of_jobs(readings)
        yield from _of_incidents(readings)

    def _read(self, job: JobDir) -> _Reading:
        status = job_status(job, ask=False)
        records, _ = find_incidents(job)
        seen = self._seen.setdefault(job.path, {})
        seen |= {record.name: record for record in records if record.cause != RUNNING}
        incidents = [*seen.values(), *(record for record in records if record.cause == RUNNING)]
        start = read_start(job)
        started = None if start is None else time.time() - (time.monotonic() - start.formed)
        name = str(status["root"] or status["directory"])
        return _Reading(name, status, rank_costs(job), incidents, _newest(job, status), started)


def _newest(job: JobDir, status: dict[str, Any]) -> dict[str, tuple[int, float | None]]:
    """Returns the newest checkpoint of each place. One in memory counts once all ranks of this node have it."""
    info = job.read_job()
    copies = drop_superseded(find_copies(job, None, own=True))
    whole = [copy for copy in copies if info is None or copy.ranks.issuperset(info.ranks)]
    found: dict[str, tuple[int, float | None]] = {}
    if whole:
        newest = max(whole, key=lambda copy: copy.checkpoint)
        found["memory"] = newest.step, committed_at(newest)
    if status["node_safe_step"] is not None:
        found["peer"] = status["node_safe_step"], _time_of(copies, status["node_safe_step"])
    if status["durable_step"] is not None:
        found["storage"] = status["durable_step"], durable_at(job.path)
    return found


def _time_of(copies: list[StoredCopy], step: int) -> float | None:
    return next((committed_at(copy) for copy in copies if copy.step == step), None)


def _of_ranks(readings: list[_Reading]) -> Iterator[Metric]:
    ranks = [([one.root, str(rank)], costs) for one in readings for rank, costs in one.costs.items()]
    labels = ["root", "rank"]
    for name, words, attribute in _OF_RANKS:
        gauge = GaugeMetricFamily(f"rekindle_{name}", words, labels=labels)
        for values, costs in ranks:
            gauge.add_metric(values, getattr(costs, attribute))
        yield gauge
    for name, words, attribute in _COUNTED:
        counter = CounterMetricFamily(f"rekindle_{name}", words, labels=labels)
        for values, costs in ranks:
            counter.add_metric(values, getattr(costs, attribute))
        yield counter
    words = "Failures since the rank's start: of a save, of memory to take saves, of an agent to run."
    failures = CounterMetricFamily("rekindle_failures", words, labels=[*labels, "kind"])
    stalls = HistogramMetricFamily(
        "rekindle_stall_seconds", "Time for which each save held training up.", labels=labels
    )
    words = "Time from one step() to the next, pauses included."
    steps = HistogramMetricFamily("rekindle_step_seconds", words, labels=labels)
    for values, costs in ranks:
        for kind, attribute in _FAILURES.items():
            failures.add_metric([*values, kind], getattr(costs, attribute))
        stalls.add_metric(values, _buckets(costs.stalls), costs.stalls.total)
        steps.add_metric(values, _buckets(costs.step_seconds), costs.step_seconds.total)
    yield from (failures, stalls, steps)


def _buckets(histogram: Histogram) -> list[tuple[str, float]]:
    """Returns the counts up to each bound, as Prometheus adds them up."""
    counts, total = [], 0
    for bound, count in zip((*map(str, BOUNDS), "+Inf"), histogram.counts, strict=True):
        total += count
        counts.append((bound, float(total)))
    return counts


def _of_jobs(readings: list[_Reading]) -> Iterator[Metric]:
    def gauge(name: str, words: str, values: Iterable[tuple[list[str], float | None]], *labels: str) -> Metric:
        family = GaugeMetricFamily(f"rekindle_{name}", words, labels=["root", *labels])
        for labelled, value in values:
            if value is not None:
                family.add_metric(labelled, value)
        return family

    def each(name: str) -> Iterator[tuple[list[str], Any]]:
        return (([one.root], one.status[name]) for one in readings)

    trainers = (([one.root], len(one.status["trainers"])) for one in readings)
    yield gauge("trainers", "Ranks of this node whose process lives.", trainers)
    agents = (([one.root], int(one.status["agent"] is not None)) for one in readings)
    yield gauge("agent_up", "1 while the job has an agent on this node, or a trainer in its place.", agents)
    yield gauge("memory_bytes", "Memory that the job holds on this node.", each("memory_bytes"))
    started = (([one.root], one.started) for one in readings)
    yield gauge("start_timestamp_seconds", "Time at which the newest start's ranks had met.", started)
    places = [([one.root, place], newest) for one in readings for place, newest in one.newest.items()]
    words = "Newest checkpoint: in this node's memory, safe on a peer from the loss of any one node, on storage."
    yield gauge("checkpoint_step", words, ((values, step) for values, (step, _) in places), "place")
    words = "Time since which it is there, as far as this node knows."
    yield gauge("checkpoint_timestamp_seconds", words, ((values, at) for values, (_, at) in places), "place")
    alarms = (
        ([one.root, kind], int(any(alarm["kind"] == kind for alarm in one.status["alarms"])))
        for one in readings
        for kind in KINDS
    )
    yield gauge("alarm", "1 while something is wrong, by its kind: 'rekindle status' tells more.", alarms, "kind")
    for name, words, key in _DRAINED:
        counter = CounterMetricFamily(f"rekindle_{name}", words, labels=["root"])
        for one in readings:
            value = (one.status["drain"] or {}).get(key)
            if value is not None:  # a trainer in the agent's place counts nothing
                counter.add_metric([one.root], value)
        yield counter


def _of_incidents(readings: list[_Reading]) -> Iterator[Metric]:
    incidents = CounterMetricFamily("rekindle_incidents", "Starts that a fault has ended.", labels=["root", "cause"])
    lost = CounterMetricFamily("rekindle_lost_steps", "Completed steps that were computed again.", labels=["root"])
    words = "Time of each part of a recovery; the parts are those of 'rekindle incidents --json'."
    parts = SummaryMetricFamily("rekindle_recovery_seconds", words, labels=["root", "part"])
    words = "Time from a fault, or from its notice, to the first new step."
    outages = SummaryMetricFamily("rekindle_outage_seconds", words, labels=["root"])
    words = "Share of time in which steps were made that were kept, from 0 to 1."
    goodput = GaugeMetricFamily("rekindle_goodput_ratio", words, labels=["root"])
    for one in readings:
        faults = [record for record in one.incidents if record.is_fault]
        causes = Counter(record.cause for record in faults)
        for cause in dict.fromkeys([*CAUSES, "unknown", *causes]):  # 0, too: else nobody sees the first one come
            incidents.add_metric([one.root, cause], causes[cause])
        totals = add_up(one.incidents)
        lost.add_metric([one.root], totals.lost)
        for part in MOMENTS:
            known = [seconds for record in faults if (seconds := record.parts()[part]) is not None]
            parts.add_metric([one.root, part], len(known), sum(known))
        whole = [record.outage for record in faults if record.outage is not None]
        outages.add_metric([one.root], len(whole), sum(whole))
        if totals.goodput is not None:
            goodput.add_metric([one.root], totals.goodput)
    yield from (incidents, lost, parts, outages, goodput)
