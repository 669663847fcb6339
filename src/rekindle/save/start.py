"""Starts a rank's saves: agrees with all ranks on when to copy, opens memory or does without, and makes the Saver."""

from __future__ import annotations

import logging

from rekindle.errors import MemoryStoreError
from rekindle.memory.job import JobInfo
from rekindle.peers.local_states import take_kept_local_state
from rekindle.save.agree import agree_on_overlap
from rekindle.save.capture import Capture
from rekindle.save.fence import Fence
from rekindle.save.metrics import Metrics
from rekindle.save.saver import Saver
from rekindle.save.schedule import Schedule
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
    schedule = Schedule(settings, meeting.nodes, group.world, metrics)
    if group.rank == 0:
        schedule.warn_of_ignored_seconds()
    host = find_host() if meeting.nodes > 1 and session.is_first_on_node else ""
    if meeting.no_memory is None:
        _open_memory(session, capture, settings, schedule, metrics, host)
    elif settings.strict:
        raise MemoryStoreError(meeting.no_memory)
    elif session.is_first_on_node:
        schedule.warn_of_direct_saves(meeting.no_memory)
    if meeting.nodes > 1:
        enter_mesh(group, session, host)
    elif session.slots is not None:
        take_kept_local_state(session.job_dir, session.slots.rank)
    saver = Saver(capture, fence, session, settings, schedule, metrics, overlap=overlap, in_step=in_step)
    if session.slots is not None and not meeting.found:
        session.slots.reserve(meeting.nbytes)  # else after the restore, which needs the cores itself
    return saver


def _open_memory(
    session: Session, capture: Capture, settings: Settings, schedule: Schedule, metrics: Metrics, host: str
) -> None:
    """Open the memory store, and start its agent, which listens on ``host``, on one rank of each node."""
    meeting, incarnation = session.agreed, session.incarnation
    if session.is_first_on_node:
        schedule.tell_cost_of_a_node()
    info = JobInfo(
        root=str(session.root),
        ranks=meeting.local_ranks,
        world=meeting.world,
        keep=settings.keep,
        keep_every=settings.keep_every,
        idle_timeout=settings.idle_timeout,
        drain_limit=settings.drain_rate,
        persist_seconds=schedule.pause,
        start=incarnation.id,
        host=host,
    )
    session.open_memory(info, settings.room, settings.fallback_after, metrics.agent, capture.devices())
    log.info(
        "rank %d of %d, generation %d: snapshots of about %.1f MB in %s, checkpoints in %s",
        *(session.rank, meeting.world, incarnation.generation, meeting.nbytes / 1e6),
        *(session.job_dir.path, session.root),
    )
