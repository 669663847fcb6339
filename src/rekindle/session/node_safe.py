"""Waits until a step survives the loss of any one node."""

from __future__ import annotations

import time
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import suppress
from typing import Any

from rekindle.common.timeouts import in_background
from rekindle.errors import NotDurableError, RekindleError, UsageError
from rekindle.format.lineage import ShardId
from rekindle.format.names import receipt_name, step_dir
from rekindle.memory.job_dir import JobDir
from rekindle.memory.nodes import describe_node
from rekindle.session.session import Session

__all__ = ["describe_delay", "refuse_wait", "wait_node_safe"]

_POLL = 0.02
"""Seconds between two looks at a small file in memory."""
_ANSWERS_WITHIN = 2.0
"""Seconds that the agent gets to say why a step isn't safe yet."""


def refuse_wait(session: Session, peer_every: object) -> None:
    """Raises UsageError where no step will ever survive the loss of a node, by the job's own settings."""
    if session.agreed.nodes == 1:
        raise UsageError("wait is 'node', and the job trains on one node: wait for 'memory' or for 'durable'")
    if peer_every is None:
        raise UsageError("wait is 'node', and peer_every is None, so that nodes copy nothing from each other")


def wait_node_safe(session: Session, stamp: ShardId, seconds: float) -> None:
    """Returns when a step that this rank has in memory survives the loss of any one node.

    Asks storage nothing. Raises NotDurableError after ``seconds``, and at once where it can't come to that.
    """
    job, start, step = session.job_dir, session.incarnation.id, stamp.step
    why = _hopeless(session, stamp)
    if why:
        raise NotDurableError(f"step {step} will not survive the loss of a node until it is on storage: {why}")
    with suppress(OSError):  # memory is full: one rank's note is enough
        job.notes.write_wanted(step)
    deadline = time.monotonic() + seconds
    while job.notes.safe_step(start) < step:
        session.check_agent()
        if time.monotonic() > deadline:
            raise NotDurableError(
                f"step {step} does not survive the loss of a node after {seconds:.0f} s: {_delay(job, step)}"
            )
        time.sleep(_POLL)


def _hopeless(session: Session, stamp: ShardId) -> str:
    """Returns the reason why other nodes can't copy this rank's part of a step; empty if they can."""
    if session.slots is None:
        return session.agreed.no_memory or "this node has no memory store"
    receipt = session.job_dir.path / step_dir(stamp.step) / receipt_name(stamp.rank, stamp.world)
    if not receipt.exists():
        return "memory did not take it, see the log for why"
    nodes = session.nodes.nodes if session.nodes is not None else []
    absent = [describe_node(node.name, node.ranks) for node in nodes if not node.port]
    return f"other nodes can't reach the agent of {', '.join(absent)}" if absent else ""


def _delay(job: JobDir, step: int) -> str:
    """Returns the reason why other nodes have not copied a step yet, as far as this node's agent knows it."""
    agent = job.agent()
    if agent is None or agent in job.trainers().values():  # a trainer that can get no agent drains in its place
        return f"no agent runs on this node, see {job.paths.agent_log}"
    try:
        asked = in_background(lambda: _ask_agent(job), "rekindle-look")
        status = asked.result(2 * _ANSWERS_WITHIN)
    except (RekindleError, RuntimeError, FutureTimeoutError) as error:  # no thread can be had, for one
        return str(error) or "this node's agent does not answer"
    return describe_delay(status, step)


def _ask_agent(job: JobDir) -> dict[str, Any]:
    from rekindle.agent.http import send_request  # noqa: PLC0415  takes long to load, and few trainers ever ask

    return send_request(job.paths.agent_socket, "GET", "/status", _ANSWERS_WITHIN)


def describe_delay(status: dict[str, Any], step: int) -> str:
    """Describes the reason by an agent's status: nodes that are not there, or have not saved the step."""
    reasons = []
    for node in status.get("nodes", []):
        name, newest = describe_node(node["name"], node["ranks"]), node["newest"]
        if node["state"] in ("silent", "agent gone", "lost"):
            reasons.append(f"{name}: {node['state']}")
        elif newest is not None and newest < step:  # outside of guard() nobody tells
            reasons.append(f"{name} has not saved it")
    copying = status.get("copying")
    if copying:
        done, total = copying["done"], copying["total"]
        reasons.append(f"this node has copied {done:,} of {total:,} bytes of step {copying['step']}")
    return "; ".join(reasons) or "copies are slow, or a node has no room for them: the agents' logs say more"
