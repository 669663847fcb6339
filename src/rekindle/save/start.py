"""Starts a rank's saves: agrees with all ranks on when to copy, opens memory or does without, and makes the Saver."""

from __future__ import annotations

import logging
from contextlib import suppress
from dataclasses import replace
from functools import partial

from rekindle.errors import MemoryStoreError
from rekindle.memory.costs import cost_page
from rekindle.memory.job import JobInfo
from rekindle.memory.pages import AT_ONCE
from rekindle.peers.local_states import take_kept_local_state
from rekindle.save.agree import agree_on_overlap
from rekindle.save.cadence import cadence_of
from rekindle.save.capture import Capture
from rekindle.save.fence import Fence
from rekindle.save.metrics import Metrics
from rekindle.save.pricing import Pricing
from rekindle.save.saver import Saver
from rekindle.save.schedule import Schedule
from rekindle.save.step_clock import StepClock
from rekindle.session.group import ProcessGroup, SingleProcess
from rekindle.session.nodes import enter_mesh, find_host
from rekindle.session.session import Session
from rekindle.settings import Settings

__all__ = ["start_saver"]

log = logging.getLogger("rekindle")


def start_saver(
    group: SingleProcess | ProcessGroup,
    session: Session,
    capture: Capture,
    fence: Fence,
    settings: Settings,
    metrics: Metrics,
) -> Saver:
    """Make the Saver of a session that has joined. A collective.

    Raises MemoryStoreError where there is no memory store and the settings are ``strict``.
    """
    overlap, in_step = agree_on_overlap(group, capture, settings)
    meeting = session.agreed
    clock = StepClock()
    cadence = cadence_of(settings, group, clock, capture, memory=meeting.no_memory is None)
    schedule = Schedule(settings, meeting.nodes, group.world, metrics, clock, cadence, capture.devices())
    host = find_host() if meeting.nodes > 1 and session.is_first_on_node else ""
    info = None
    if meeting.no_memory is None:
        info = _open_memory(session, capture, settings, schedule, metrics, host)
        metrics.show_on(cost_page(session.job_dir.path, group.rank), session.incarnation.generation)
        if session.is_first_on_node:
            schedule.pricing = Pricing(session.job_dir, session.incarnation.id, schedule.clock)
    elif settings.strict:
        raise MemoryStoreError(meeting.no_memory)
    if meeting.nodes > 1:
        enter_mesh(group, session, host)
        metrics.read_node_safe(partial(session.job_dir.notes.safe_step, session.incarnation.id))
        if not session.is_in_whole_mesh:
            _do_without_mesh(session, schedule, info)
    elif session.slots is not None:
        take_kept_local_state(session.job_dir, session.slots.rank)
    _tell(session, schedule)
    saver = Saver(capture, fence, session, settings, schedule, metrics, overlap=overlap, in_step=in_step)
    if not meeting.found:
        session.reserve(meeting.nbytes)  # else after the restore, which needs the cores itself
        if session.slots is not None and session.rank == 0 and meeting.nbytes > AT_ONCE:
            saver.gaps.expect_first(meeting.nbytes)
    return saver


def _open_memory(
    session: Session, capture: Capture, settings: Settings, schedule: Schedule, metrics: Metrics, host: str
) -> JobInfo:
    """Open the memory store, and start its agent, which listens on ``host``, on one rank of each node.

    Returns what the agent is told.
    """
    meeting, incarnation = session.agreed, session.incarnation
    info = JobInfo(
        root=str(session.root),
        ranks=meeting.local_ranks,
        world=meeting.world,
        keep=settings.keep,
        keep_every=settings.keep_every,
        idle_timeout=settings.idle_timeout,
        drain_limit=settings.drain_rate,
        persist_seconds=schedule.pause,
        persist_budget=schedule.budget,
        start=incarnation.id,
        host=host,
        peer_every=settings.peer_every,
        peer_limit=settings.peer_rate,
        patience=settings.patience,
        headroom=settings.room.headroom(session.job_dir),
    )
    session.open_memory(info, settings.room, settings.fallback_after, metrics.agent, capture.devices())
    log.info(
        "rank %d of %d, generation %d: snapshots of about %.1f MB in %s, checkpoints in %s",
        *(session.rank, meeting.world, incarnation.generation, meeting.nbytes / 1e6),
        *(session.job_dir.path, session.root),
    )
    return info


def _do_without_mesh(session: Session, schedule: Schedule, info: JobInfo | None) -> None:
    """Have a number choose the steps for storage, here and in what the agent is told."""
    schedule.do_without_mesh()
    if info is not None and session.is_first_on_node:
        with suppress(OSError):  # the agent then drains steps of its own choice, which other nodes may not have
            session.job_dir.write_job(replace(info, persist_seconds=schedule.pause, persist_budget=None))


def _tell(session: Session, schedule: Schedule) -> None:
    """Log what faults would cost, and settings that have no effect."""
    schedule.tell_how_often()
    if session.rank == 0:
        schedule.warn_of_ignored_seconds()
    if session.is_first_on_node:
        why = session.agreed.no_memory
        if why is None:
            schedule.tell_cost_of_a_node()
        else:
            schedule.warn_of_direct_saves(why)
