"""Tells what is wrong with a job, each thing by its kind: for ``status``, for metrics, for a page. Pure functions."""

from __future__ import annotations

from typing import Any, NamedTuple

from rekindle.cli.nodes import describe_missed

__all__ = ["KINDS", "Alarm", "find_alarms"]

KINDS = {
    "deleted": "The root was deleted. Start the job again, or give memory back by 'rekindle stop --discard ROOT'.",
    "orphan": "Start the job again on this node, or give the step up with 'rekindle stop --discard ROOT'.",
    "node": "See that the node is up and reachable. The job restarts without it if its launcher may do so.",
    "agent": "Training goes on, and starts an agent again by itself: see agent.log in the job's memory if it does not.",
    "undrained": "Start the job again on this node, or carry its newest step to storage with 'rekindle stop ROOT'.",
    "storage": "Training goes on, and memory holds the newest steps: mend the storage. The drain goes on by itself.",
    "waiting": "See that the other nodes' agents run and reach storage.",
    "given-up": "The root was deleted. Start the job again, or let its memory go.",
    "silent": "The agent hangs or is stopped. Training ranks replace it by themselves; else end it with SIGKILL.",
}
"""Advice by kind of alarm, the gravest kind first."""


class Alarm(NamedTuple):
    """One thing that is wrong."""

    kind: str
    """One of ``KINDS``."""
    what: str


def find_alarms(
    status: dict[str, Any], newest: int | None, *, deleted: str | None, orphan: str | None, silence: str | None
) -> list[Alarm]:
    """Returns all that is wrong with a job, the gravest first.

    ``status`` is a job's, without its problems; ``newest`` the newest step in this node's memory. The others are known
    already: the root was deleted; nobody knows the snapshots' root; the agent does not answer.
    """
    drain, durable = status["drain"] or {}, status["durable_step"]
    agent, trainers = status["agent"], status["trainers"]
    error = drain.get("error")
    found = {
        "deleted": deleted,
        "orphan": orphan,
        "node": describe_missed(status["nodes"], status["fault"], trains=bool(trainers)),
        "storage": None if error == orphan else error,
        "waiting": drain.get("waits"),
        "given-up": drain.get("given_up"),
        "silent": silence,
    }
    if agent is None and trainers:
        found["agent"] = "no agent: nothing is being drained to storage"
    elif agent is None and newest is not None and (durable is None or newest > durable):
        found["undrained"] = f"step {newest} is only in memory, and no agent drains it: run 'rekindle stop ROOT'"
    name = f"{status['root'] or status['directory']}: "
    return [Alarm(kind, what.removeprefix(name)) for kind in KINDS if (what := found.get(kind))]
