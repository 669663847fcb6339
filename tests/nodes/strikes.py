"""Brings faults about: of ranks, agents, nodes, links and mounts; on the second node, unless told otherwise."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

from tests.nodes.job import Job


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
    _signal_agent(job, signal.SIGKILL)


def stop_agent(job: Job) -> None:
    """For three seconds."""
    _signal_agent(job, signal.SIGSTOP)
    time.sleep(3.0)
    _signal_agent(job, signal.SIGCONT)


def _signal_agent(job: Job, number: int) -> None:
    for pid in job.lab.nodes[1].processes("rekindle.agent"):
        os.kill(pid, number)


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


def fin(job: Job) -> None:
    _lose(job, 1, power=False)


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
    """All nodes of a domain lose their power at once. As many fresh ones come."""
    lost = [node for node in job.lab.nodes if node.domain == job.lab.nodes[-1].domain]
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
    mark = "is node nodeb"
    kill_agent(job)
    job.wait_until(lambda: job.agent_logs["nodeb"].count(mark) == 2, "new agent in the mesh")
    newest = _newest(job)
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

    def strike(job: Job) -> None:
        job.lab.nodes[1].cut()
        time.sleep(seconds)
        job.lab.nodes[1].heal()

    return strike


def mute(seconds: float) -> Callable[[Job], None]:
    """What a node sends is lost for a moment, and it still hears all others."""

    def strike(job: Job) -> None:
        job.lab.nodes[1].mute()
        time.sleep(seconds)
        job.lab.nodes[1].unmute()

    return strike


def slow(job: Job) -> None:
    job.lab.nodes[1].slow_down("1mbit")


def lose_mount(job: Job) -> None:
    """The storage is out of a node's sight for three seconds."""
    job.lab.nodes[1].unmount()
    time.sleep(3.0)
    job.lab.nodes[1].remount()


def kill_rank_on_a_slow_link(job: Job) -> None:
    slow(job)
    kill_rank(job)
