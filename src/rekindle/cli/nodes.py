"""Reads what an agent tells of all nodes of a job. Leaves tables to the commands."""

from __future__ import annotations

from typing import Any

from rekindle.memory.fault import LOST
from rekindle.memory.job import JobInfo
from rekindle.memory.job_dir import JobDir
from rekindle.memory.nodes import describe_node
from rekindle.storage.catalog import StoredCopy

__all__ = ["describe_missed", "former_safe", "lag_of", "ranks_of_nodes", "read_node_safe", "take_nodes"]


def take_nodes(answer: dict[str, Any] | None) -> list[dict[str, Any]]:
    """Takes the nodes out of an agent's answer; none of a job on one node, or without an agent."""
    nodes: list[dict[str, Any]] = answer.pop("nodes", []) if answer is not None else []
    for node in nodes:
        for field in ("steps", "pages"):  # in JSON a rank became a text
            node[field] = {int(rank): value for rank, value in node[field].items()}
    return nodes


def ranks_of_nodes(nodes: list[dict[str, Any]], own: dict[int, dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """Returns the pages of all ranks of a job, each with the name of its node. Takes those of other nodes out of nodes.

    ``own`` are those of this node: newer than what its agent has told others.
    """
    found: dict[int, dict[str, Any]] = {}
    here = None
    for node in nodes:
        pages = node.pop("pages")
        if node["state"] == "here":
            here = node["name"]
        else:
            found |= {rank: {**page, "node": node["name"]} for rank, page in pages.items()}
    found |= {rank: {**page, "node": here} for rank, page in own.items()}
    return dict(sorted(found.items()))


def describe_missed(nodes: list[dict[str, Any]], fault: dict[str, Any] | None, *, trains: bool) -> str | None:
    """Names the nodes that should be there and are not; None if there are none.

    The agents of a job that ended leave one by one. ``trains`` is True while it has trainers on this node.
    """
    told = []
    for node in nodes:
        name = describe_node(node["name"], node["ranks"])
        struck = fault is not None and fault["cause"] == LOST and fault["rank"] in node["ranks"]
        heard = "" if node["seconds"] is None else f": last heard {node['seconds']:.1f} s ago"
        if node["state"] == "agent gone" and trains:
            told.append(f"{name} has no agent{heard}")
        elif node["state"] in ("silent", "lost") and (trains or struck):
            told.append(f"{name} is {node['state']}{heard or ', and was never heard'}")
    return "; ".join(told) or None


def read_node_safe(job: JobDir, info: JobInfo | None) -> int | None:
    """Returns the newest step of the newest start that survives the loss of any one node; None if there is none."""
    step = -1 if info is None else job.notes.safe_step(info.start)
    return None if step < 0 else step


def former_safe(job: JobDir, info: JobInfo | None, memory: list[StoredCopy]) -> int | None:
    """Returns the step of a former start that was node-safe, while this node has it and the newest start has none.

    It still is, unless a node was lost since.
    """
    marks = job.notes.marks()
    safe = marks.safe if marks is not None else None
    if safe is None or info is None or safe.start == info.start:
        return None
    return safe.step if any((copy.incarnation.id, copy.step) == safe for copy in memory) else None


def lag_of(safe: int | None, memory: list[StoredCopy], nodes: list[dict[str, Any]]) -> int | None:
    """Returns the steps by which a step that is node-safe is behind the newest that any node has; None without one."""
    if safe is None:
        return None
    steps: list[int] = [copy.step for copy in memory] + [node["newest"] for node in nodes if node["newest"] is not None]
    return max([0, *(step - safe for step in steps)])
