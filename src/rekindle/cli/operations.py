"""Reads the status of jobs and stops them, for an operator. Leaves all formatting to the commands."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping
from concurrent.futures import wait
from contextlib import suppress
from pathlib import Path
from typing import Any

from rekindle.agent.drain import TICK, Drainer, DrainProgress
from rekindle.agent.http import send_request
from rekindle.agent.service import describe_orphan
from rekindle.cli.alarms import find_alarms
from rekindle.cli.nodes import former_safe, lag_of, ranks_of_nodes, read_node_safe, take_nodes
from rekindle.cli.stopping import OtherAgents
from rekindle.common.os_errors import explain
from rekindle.common.timeouts import in_background
from rekindle.errors import AgentError, BusyError, FormatError, NotDurableError, NotFoundError
from rekindle.format.fields import loads
from rekindle.format.names import Root
from rekindle.format.receipt import read_file
from rekindle.memory.fault import Fault
from rekindle.memory.job_dir import JobDir
from rekindle.memory.lock import Lock
from rekindle.memory.status import Status, describe_status, read_status
from rekindle.storage.catalog import find_copies
from rekindle.storage.listing import describe_deleted, job_info, root_hint
from rekindle.storage.open import open_store

__all__ = ["ended_status", "job_status", "status_pages", "stop"]

_HANGS_AFTER = 10.0
"""Seconds without an answer after which storage counts as hanging, no longer as slow."""
_ANSWERS_WITHIN = 3.0
"""Seconds that storage gets to tell if a root was deleted: the root may be one of many."""
_SILENT_AFTER = 10.0
"""Seconds without a sign of life of an agent, which gives one each second."""
_REBUILT_WITHIN = 5.0
"""Seconds that an agent gets to rebuild dead ranks' snapshots, during which it holds the trainers' locks."""


def status_pages(job: JobDir) -> dict[int, Status]:
    """Maps the node's live ranks that train inside of ``guard()`` to their status pages."""
    found = {}
    for rank, pid in job.trainers().items():
        with suppress(OSError, FormatError):
            page = read_status(job.paths.status_page(rank))
            if page.pid == pid:
                found[rank] = page
    return found


def job_status(job: JobDir, *, ask: bool = True) -> dict[str, Any]:
    """Returns the status of one job, as ``rekindle status --json`` shows it. ``problem`` is None when all is well.

    Without ``ask`` it takes what this node's memory tells: no agent is asked, which may not answer, nor storage. Other
    nodes are unknown then.
    """
    info, agent, trainers = job.read_job(), job.agent(), job.trainers()
    memory = find_copies(job, None, own=True)
    drain, silence = (_ask_agent if ask else _read_agent)(job, agent, trainers)
    nodes = take_nodes(drain)
    own = {rank: describe_status(page) for rank, page in status_pages(job).items()}
    safe = read_node_safe(job, info)
    status: dict[str, Any] = {
        "root": info.root if info else None,
        "directory": str(job.path),
        "trainers": trainers,
        "ranks": ranks_of_nodes(nodes, own),
        "nodes": nodes,
        "fault": _last_fault(job),
        "agent": agent,
        "memory_bytes": job.held_bytes(),
        "memory_steps": sorted({copy.step for copy in memory}, reverse=True),
        "durable_step": job.notes.durable(),
        "node_safe_step": safe,
        "node_safe_lag": lag_of(safe, memory, nodes),
        "node_safe_before": former_safe(job, info, memory),
        "peer_every": None if info is None or not nodes else info.peer_every,
        "problem": None,
        "alarms": [],
        "drain": drain,
    }
    deleted = describe_deleted(job, _ANSWERS_WITHIN) if ask and not trainers else None
    newest = memory[0].step if memory else None
    alarms = find_alarms(status, newest, deleted=deleted, orphan=describe_orphan(job), silence=silence)
    status["alarms"] = [alarm._asdict() for alarm in alarms]
    status["problem"] = alarms[0].what if alarms else None
    if deleted is not None:
        status["durable_step"] = None
    elif status["durable_step"] is None and drain:
        status["durable_step"] = drain.get("durable")  # that of an earlier start of the job
    return status


def _ask_agent(job: JobDir, agent: int | None, trainers: dict[int, int]) -> tuple[dict[str, Any] | None, str | None]:
    """Returns the drain's progress as the agent reports it, and the reason why an agent doesn't answer."""
    if agent is None:
        return None, None
    try:
        return send_request(job.paths.agent_socket, "GET", "/status"), None
    except AgentError as error:
        # A trainer that could get no agent drains in a thread, holds the agent's lock and answers no requests.
        return None, None if agent in trainers.values() else str(error)


def _read_agent(job: JobDir, agent: int | None, trainers: dict[int, int]) -> tuple[dict[str, Any] | None, str | None]:
    """Returns what the agent that lives has written of its drain, and the reason if that is no news any more."""
    try:
        status = loads(read_file(job.paths.agent_status))
    except (OSError, ValueError):
        return None, None
    if agent is None or not _is_report(status) or status["pid"] != agent:
        return None, None
    silent = time.time() - _changed_at(job.paths.agent_status)
    if silent > _SILENT_AFTER and agent not in trainers.values():
        return status, f"agent {agent} gives no sign of life, for {silent:.0f} s now"
    return status, None


def _is_report(status: Any) -> bool:
    """True of what an agent writes of its drain: its numbers are numbers, and its words are words."""
    if type(status) is not dict or type(status.get("pid")) is not int:
        return False
    numbers = [status.get(name) or 0 for name in ("durable", "drained", "nbytes", "busy", "failures")]
    words = [status.get(name) or "" for name in ("error", "waits", "given_up")]
    return {*map(type, numbers)} <= {int, float} and {*map(type, words)} == {str}


def _changed_at(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return time.time()


def ended_status(root: Root, base: Path) -> dict[str, Any]:
    """Returns the status of a job that has ended and has nothing in this node's memory.

    Raises NotFoundError when storage has no checkpoint of it either.
    """
    try:
        published = open_store(root).published()
    except NotADirectoryError:
        published = []
    if not published:
        instead = root_hint(root, base)
        raise NotFoundError(f"{root}: has nothing in memory on this node, and no checkpoint on storage{instead}")
    return {
        **{"root": str(root), "directory": None, "trainers": {}, "ranks": {}, "nodes": []},
        **{"fault": None, "agent": None},
        **{"memory_bytes": 0, "memory_steps": [], "durable_step": published[-1].stamp.step},
        **{"node_safe_step": None, "node_safe_lag": None, "node_safe_before": None, "peer_every": None},
        **{"problem": None, "alarms": [], "drain": None},
    }


def _last_fault(job: JobDir) -> dict[str, Any] | None:
    try:
        return Fault.from_json(loads(read_file(job.paths.fault))).to_json()
    except (OSError, ValueError):
        return None


def stop(
    job: JobDir, timeout: float, progress: Callable[[dict[str, Any]], object], *, discard: bool = False
) -> dict[str, str]:
    """Ends a job for good: drains what only memory holds, then gives the memory back. Other nodes do the same.

    With ``discard`` this node's memory is given back at once, and what only memory held is lost. Raises BusyError while
    trainers live, NotDurableError when storage didn't take everything in ``timeout`` seconds: the memory then stays.
    Returns what became of each other node.
    """
    deadline = time.monotonic() + timeout
    rebuilt_by = time.monotonic() + _REBUILT_WITHIN
    while set(job.trainers().values()) == {job.agent()} and time.monotonic() < rebuilt_by:
        time.sleep(TICK)
    if job.trainers():
        raise BusyError(f"{job.path}: is being trained by processes {sorted(job.trainers().values())}: end them first")
    why = describe_orphan(job)
    if why is not None and not discard:
        raise NotDurableError(f"{job.path}: {why}")
    if not discard and job.path.exists():
        _refuse_deleted(job, deadline)
    others = OtherAgents(job)
    if discard:
        others.leave("keeps its memory: run 'rekindle stop --discard' there, too")
    else:
        others.ask()  # before anything ends: a step is whole on storage once each node has written its part
    agent = job.agent()
    if agent is not None:
        _end_agent(job, agent, deadline, progress, discard=discard)
    if job.path.exists():
        _end_here(job, deadline, progress, discard=discard)
    others.wait(deadline, lambda: progress(vars(DrainProgress())))
    return others.said


def _refuse_deleted(job: JobDir, deadline: float) -> None:
    """Raises NotDurableError where the root was deleted: the user must say what is to become of memory's snapshots."""
    why = describe_deleted(job, max(1.0, min(_HANGS_AFTER, deadline - time.monotonic())))
    if why is not None:
        info = job.read_job()
        raise NotDurableError(f"{info.root if info is not None else job.path}: {why}")


def _end_agent(
    job: JobDir, agent: int, deadline: float, progress: Callable[[dict[str, Any]], object], *, discard: bool
) -> None:
    if discard and agent > 0:  # 0: it has not written down its process id yet
        os.kill(agent, signal.SIGTERM)  # it ends after the drain in hand, and leaves the memory to this process
    elif not discard:
        send_request(job.paths.agent_socket, "POST", "/stop")
    while job.agent() == agent:
        if time.monotonic() > deadline:
            raise NotDurableError(f"{job.path}: agent {agent} has not finished in time: {_error(job)}")
        try:
            progress(send_request(job.paths.agent_socket, "GET", "/status", timeout=2.0))
        except AgentError:
            pass  # it is just ending
        time.sleep(TICK)


def _error(job: JobDir) -> str:
    try:
        progress = send_request(job.paths.agent_socket, "GET", "/status", timeout=2.0)
    except AgentError as failure:
        return str(failure)
    return progress["error"] or progress.get("waits") or _so_far(progress)


def _so_far(progress: Mapping[str, Any]) -> str:
    if progress["step"] is None:
        return "storage is slow, or other nodes have not finished"
    done, total = progress["done"], progress["total"]
    return f"storage has {done:,} of {total:,} bytes of step {progress['step']} so far: give it more time (--timeout)"


def _end_here(job: JobDir, deadline: float, progress: Callable[[dict[str, Any]], object], *, discard: bool) -> None:
    lock = Lock(job.paths.agent_lock)
    if not lock.acquire(5.0):
        raise BusyError(f"{job.path}: process {job.agent()} has become its agent: try again")
    try:
        drainer = Drainer(job)
        while not discard:
            # At least once: it also gives a killed drain's checkpoint its final name.
            busy = _in_time(deadline, job, drainer, drainer.tick, progress)
            if not _in_time(deadline, job, drainer, lambda: _pending(drainer), progress):
                break
            if time.monotonic() > deadline:
                raise _not_in_time(job, drainer)
            if not busy:
                time.sleep(TICK)
        if not discard:
            _in_time(deadline, job, drainer, lambda: drainer.finish(deadline), progress)
        if not job.remove():
            raise BusyError(f"{job.path}: a trainer has started again, so its memory stays")
    finally:
        lock.release()


def _in_time(
    deadline: float,
    job: JobDir,
    drainer: Drainer,
    work: Callable[[], bool],
    progress: Callable[[dict[str, Any]], object],
) -> bool:
    """Returns the result of ``work``, and reports ``progress`` meanwhile.

    Raises NotDurableError when storage that is slow or hangs keeps it from ending in time.
    """
    answer = in_background(work, "rekindle-stop")
    last = max(deadline, time.monotonic() + 1.0)
    while not wait([answer], TICK).done:
        progress(vars(drainer.progress))
        if time.monotonic() > last:
            raise _not_in_time(job, drainer)
    progress(vars(drainer.progress))
    return answer.result()


def _not_in_time(job: JobDir, drainer: Drainer) -> NotDurableError:
    done = drainer.progress
    silent = 0.0 if done.moved is None else time.monotonic() - done.moved
    why = done.error or done.waits or _so_far(vars(done))
    if silent > _HANGS_AFTER:
        info = job_info(job)
        where = info.root if info is not None else job.path
        why = f"{where}: does not answer, for {silent:.0f} s now: its file system hangs, see that the server is there"
    return NotDurableError(f"{job.path}: what memory holds is not on storage: {why}")


def _pending(drainer: Drainer) -> bool:
    try:
        return drainer.pending() is not None
    except OSError as error:
        drainer.progress.error = explain(error)
        return True
