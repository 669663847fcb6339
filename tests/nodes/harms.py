"""What befalls a job on several nodes under soak: each harm strikes a rank or a node that chance picks."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from tests.nodes.job import Job
from tests.nodes.lab import Node
from tests.nodes.strikes import signal_agent

__all__ = ["HARMS", "Harm"]

_Strike = Callable[[Job, random.Random], None]


@dataclass(frozen=True)
class Harm:
    """``strike`` returns when all of it that heals has healed."""

    strike: _Strike
    restarts: bool = True
    """Ends a start. Else nothing may come of it."""
    lost_node: bool = False
    """A node's memory is gone."""
    without_agents: bool = False
    """Agents are away meanwhile, so that replicas alone are not enough to go on from."""


def _node(job: Job, dice: random.Random) -> Node:
    """One that trains."""
    return job.node_of(dice.randrange(job.task.world))


def _signal_rank(number: int) -> _Strike:
    return lambda job, dice: job.signal(dice.randrange(job.task.world), number)


def _kill_ranks(job: Job, dice: random.Random) -> None:
    """All ranks of all nodes, at once."""
    for pid in [job.process_of(rank) for rank in range(job.task.world)]:
        os.kill(pid, signal.SIGKILL)


def _kill_agent(job: Job, dice: random.Random) -> None:
    node = _node(job, dice)
    killed = signal_agent(job, node, signal.SIGKILL)
    job.wait_until(lambda: bool(set(node.processes("rekindle.agent")) - set(killed)), "agent in place of it")


def _stop_agent(job: Job, dice: random.Random) -> None:
    agents = signal_agent(job, _node(job, dice), signal.SIGSTOP)
    time.sleep(dice.uniform(0.5, 4.0))
    for pid in agents:
        os.kill(pid, signal.SIGCONT)


def _cut(least: float, most: float) -> _Strike:
    """Takes a cable out of the switch for some seconds."""

    def strike(job: Job, dice: random.Random) -> None:
        node = _node(job, dice)
        node.cut()
        time.sleep(dice.uniform(least, most))
        node.heal()

    return strike


def _unmount(job: Job, dice: random.Random) -> None:
    node = _node(job, dice)
    node.unmount()
    time.sleep(dice.uniform(1.0, 5.0))
    node.remount()


def _lose(*, power: bool) -> _Strike:
    """A node is lost, and a fresh one comes."""

    def strike(job: Job, dice: random.Random) -> None:
        node = _node(job, dice)
        if power:
            node.lose_power()
        else:
            node.kill()
        job.lab.add()

    return strike


def _lose_behind(number: int) -> _Strike:
    """A node is lost moments after agents that chance picks got a signal, before all of them are back."""

    def strike(job: Job, dice: random.Random) -> None:
        nodes = [job.node_of(rank) for rank in range(job.task.world)]
        struck = [pid for node in nodes if dice.random() < 0.7 for pid in signal_agent(job, node, number)]
        time.sleep(dice.uniform(0.0, 2.0))
        _lose(power=False)(job, dice)
        time.sleep(2.0)
        for pid in struck:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

    return strike


HARMS: dict[str, Harm] = {
    "rank killed": Harm(_signal_rank(signal.SIGKILL)),
    "all ranks killed": Harm(_kill_ranks),
    "rank stopped": Harm(_signal_rank(signal.SIGSTOP)),
    "agent killed": Harm(_kill_agent, restarts=False),
    "agent stopped": Harm(_stop_agent, restarts=False),
    "link cut for up to 4 s": Harm(_cut(0.1, 4.0), restarts=False),
    "link cut for 12 s or more": Harm(_cut(12.0, 15.0)),
    "node lost, power": Harm(_lose(power=True), lost_node=True),
    "node lost, sockets closed": Harm(_lose(power=False), lost_node=True),
    "storage unmounted": Harm(_unmount, restarts=False),
    "agents killed, node lost": Harm(_lose_behind(signal.SIGKILL), lost_node=True, without_agents=True),
    "agents stopped, node lost": Harm(_lose_behind(signal.SIGSTOP), lost_node=True, without_agents=True),
}
"""By the name that people see."""
