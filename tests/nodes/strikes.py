"""Brings faults about: of ranks, agents, nodes, links and mounts; on the second node, unless told otherwise."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from math import ceil
from pathlib import Path

from tests.nodes.job import Job
from tests.nodes.lab import Node

SLOW_MEGABITS = 500
"""A second, of the link to a node that has to get a large state."""
_UNTIL_SAFE = 4.5
"""Seconds in which steps may not come to be node-safe once an agent that was killed is followed: docs/nodes.md."""
_REACH = """
import socket
try:
    socket.create_connection(("{}", 9), 0.3)
except ConnectionRefusedError:
    print("refused")
except OSError:
    print("nothing")
"""


def kill_rank(job: Job) -> None:
    job.signal(1)


def stop_rank(job: Job) -> None:
    job.signal(1, signal.SIGSTOP)


def kill_all_ranks(job: Job) -> None:
    for rank in _ranks(job):
        job.signal(rank)


def _ranks(job: Job) -> range:
    """The ranks of the second node, as they are placed at first."""
    each = job.task.world // job.nodes
    return range(each, 2 * each)


def kill_agent(job: Job) -> None:
    """Returns when another one has followed, and hears the other nodes."""
    signal_agent(job, job.lab.nodes[1], signal.SIGKILL)
    job.wait_until(lambda: job.agent_logs["nodeb"].count("is node nodeb") == 2, "new agent in the mesh")


def stop_agent(job: Job) -> None:
    """For three seconds."""
    stopped = signal_agent(job, job.lab.nodes[1], signal.SIGSTOP)
    time.sleep(3.0)
    for pid in stopped:
        os.kill(pid, signal.SIGCONT)


def signal_agent(job: Job, node: Node, number: int) -> list[int]:
    """Sends it to the agent of a node, once there is one. Returns its processes, when they have ended or stopped."""
    job.wait_until(lambda: bool(node.processes("rekindle.agent")), f"agent on {node.name}")
    found = node.processes("rekindle.agent")
    for pid in found:
        os.kill(pid, number)
    job.wait_until(lambda: all(_state(pid) in "TZ" for pid in found), f"agent struck on {node.name}")
    return found


def _state(pid: int) -> str:
    """The letter of a process's state, as ps shows it; empty if there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return ""


def power(job: Job) -> None:
    _lose(job, 1, power=True)


def power_of_the_first(job: Job) -> None:
    """The ranks that are left move: a launcher orders nodes by their addresses."""
    _lose(job, 0, power=True)


def power_beside_a_spare(job: Job) -> None:
    """Of a node that trains, and whose launcher doesn't lead: any of three may be the spare."""
    found = [job.node_of(rank) for rank in range(job.task.world)]
    next(node for node in found if node is not job.lab.nodes[0]).lose_power()


def power_of_the_leader(job: Job) -> None:
    """Of the node whose launcher leads: it trains, as no other one can have come before it."""
    job.lab.nodes[0].lose_power()


def power_beside_a_slow_spare(job: Job) -> None:
    """All bytes that the spare node needs come over a link of a known rate."""
    found = [job.node_of(rank) for rank in range(job.task.world)]
    next(node for node in job.lab.nodes if node not in found).slow_down(f"{SLOW_MEGABITS}mbit")
    power_beside_a_spare(job)


def fin(job: Job) -> None:
    _lose(job, 1, power=False)


def fin_of_the_first(job: Job) -> None:
    _lose(job, 0, power=False)


def _lose(job: Job, index: int, *, power: bool) -> None:
    """A node is lost; a fresh one comes unless a spare is there."""
    node = job.lab.nodes[index]
    if power:
        node.lose_power()
    else:
        node.kill()
    if sum(node.alive for node in job.lab.nodes) < job.nodes:
        job.lab.add(domain=node.domain)


def lose_second_domain(job: Job) -> None:
    """All nodes of a domain lose their power at once."""
    _lose_at_once(job, [node for node in job.lab.nodes if node.domain == job.lab.nodes[-1].domain])


def lose_two_that_are_no_partners(job: Job) -> None:
    """Of four nodes, of which each copies from the next but one, the two in the middle lose their power at once."""
    _lose_at_once(job, job.lab.nodes[1:3])


def _lose_at_once(job: Job, lost: list[Node]) -> None:
    """As many fresh ones come."""
    for node in lost:
        node.cut()
    for node in lost:
        node.kill()
    for node in lost:
        job.lab.add(domain=node.domain)


def lose_both_in_turn(job: Job) -> None:
    """The second node is lost when the job has gone on without the first."""
    newest = _newest(job)
    _lose(job, 1, power=True)
    job.wait_for_step(newest + 6, start=1)
    job.wait_for_safe(start=1)
    _lose(job, 0, power=True)


def _newest(job: Job) -> int:
    return max(row["step"] for row in job.rows("step"))


def lose_with_a_new_agent(job: Job) -> None:
    """The agent of the lost node was killed before, and has been followed by another one."""
    before = _newest(job)
    kill_agent(job)
    newest = _newest(job)
    job.away = newest - before + ceil(_UNTIL_SAFE / job.task.pause)
    job.wait_for_step(newest + 3)
    job.wait_for_safe(beyond=newest)
    _lose(job, 1, power=True)


def kill_rank_and_lose_its_node(job: Job) -> None:
    kill_rank(job)
    time.sleep(0.3)
    _lose(job, 1, power=True)


def lose_the_replacement(job: Job) -> None:
    """The node that takes the place of a lost one is lost while the job restarts on it."""
    _lose(job, 1, power=False)
    job.wait_until(lambda: any(row["host"] == "nodec" for row in job.rows("met")), "rank on the new node")
    _lose(job, 2, power=False)


def preempt(job: Job) -> None:
    """A node's ranks are told to go; five seconds later the node is gone."""
    node = job.lab.nodes[1]
    for rank in _ranks(job):
        job.signal(rank, signal.SIGTERM)
    node.leaving = True
    time.sleep(5.0)
    _lose(job, 1, power=True)


def blip(seconds: float) -> Callable[[Job], None]:
    """The cable of a node is out of the switch for a moment."""

    return lambda job: _break_for(seconds, job, Node.cut, Node.heal)


def mute(seconds: float) -> Callable[[Job], None]:
    """What a node sends is lost for a moment, and it still hears all others."""

    return lambda job: _break_for(seconds, job, Node.mute, Node.unmute)


def _break_for(seconds: float, job: Job, break_it: Callable[[Node], None], mend: Callable[[Node], None]) -> None:
    """Lets the second node's link be broken for so long, and sees that it is, and is not any more after that."""
    node = job.lab.nodes[1]
    break_it(node)
    until = time.monotonic() + seconds
    assert _reaches_first(job) == "nothing\n", "the link is not broken"
    time.sleep(max(0.0, until - time.monotonic()))
    mend(node)
    job.wait_until(lambda: _reaches_first(job) == "refused\n", "link again")


def _reaches_first(job: Job) -> str:
    """What the second node hears when it connects to a port of the first one at which nobody listens."""
    return job.lab.nodes[1].run(sys.executable, "-IS", "-c", _REACH.format(job.lab.nodes[0].address))


def slow(job: Job) -> None:
    job.lab.nodes[1].slow_down("1mbit")


def lose_mount(job: Job) -> None:
    """The storage is out of a node's sight for three seconds."""
    node = job.lab.nodes[1]
    seen = node.inside(job.task.root)
    assert seen.exists()
    node.unmount()
    assert not seen.exists()
    time.sleep(3.0)
    node.remount()
    assert seen.exists()


def kill_rank_on_a_slow_link(job: Job) -> None:
    slow(job)
    kill_rank(job)
