"""Simulates a job of many nodes on a virtual clock, and a network that loses, delays and reorders beats."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass

from rekindle.peers.membership import BEAT_EVERY, Event, Membership


@dataclass
class Harm:
    """A disturbance of a while: agents are stopped, nodes cut off from all others, or from each other only."""

    kind: str
    """"stop", "cut" or "apart"."""
    nodes: tuple[int, ...]
    begin: float
    end: float

    def cuts(self, one: int, other: int, at: float) -> bool:
        if self.kind == "stop" or not self.begin <= at < self.end:
            return False
        inside = (one in self.nodes) + (other in self.nodes)
        return inside == (1 if self.kind == "cut" else 2)


class SimulatedJob:
    """The agents of some nodes. A rank completes steps, where the job is said to tell, while all nodes are together."""

    def __init__(self, count: int, chances: random.Random, patience: float, drops: float = 0.03) -> None:
        self.count, self.chances, self.patience, self.drops = count, chances, patience, drops
        self.members = [Membership(own, count, 0.0, patience) for own in range(count)]
        self.events: list[list[tuple[float, Event]]] = [[] for _ in range(count)]
        """The time and the event, of each node."""
        self.harms: list[Harm] = []
        self.dead: dict[int, float] = {}
        """The time at which a node ended."""
        self.without_agent: dict[int, float] = {}
        """The nodes whose agents ended, and the time at which there is another one."""
        self.now, self._number = 0.0, 0
        self._todo: list[tuple[float, int, Callable[[], None]]] = []

    def at(self, time: float, do: Callable[[], None]) -> None:
        self._number += 1
        heapq.heappush(self._todo, (time, self._number, do))

    def run(self, seconds: float) -> None:
        for node in range(self.count):
            self.at(self.chances.random() * BEAT_EVERY, lambda node=node: self._beat(node))
        while self._todo[0][0] < seconds:
            self.now, _, do = heapq.heappop(self._todo)
            do()

    def step(self, every: float) -> None:
        """Completes a step on all nodes while all are alive and connected, and goes on."""
        if not self.dead and not any(h.kind != "stop" and h.begin <= self.now < h.end for h in self.harms):
            for node in range(self.count):
                self._reach(node, 0.0, lambda node=node: self.members[node].progressed(self.now))
        self.at(self.now + every, lambda: self.step(every))

    def die(self, node: int, how: str) -> None:
        """Ends a node: by "power", which nobody is told, or by "fin", which closes its links and fails collectives."""
        self.dead[node] = self.now
        if how == "fin":
            self._close(node)
            self.fail_collectives()

    def fail_collectives(self) -> None:
        for node in range(self.count):
            delay = self.chances.random() * 0.4
            self._reach(node, delay, lambda node=node: self.members[node].collective_failed(self.now))

    def end_agent(self, node: int, until: float) -> None:
        """Ends an agent. Its links close, and attempts are refused until another one forms the mesh anew."""
        self.without_agent[node] = until
        self._close(node)
        for other in self.members[node].neighbours:
            self._refuse(node, other)
        fresh = (node, self.count)
        self.at(until, lambda: self.members.__setitem__(node, Membership(*fresh, self.now, self.patience)))

    def _close(self, node: int) -> None:
        for other in self.members[node].neighbours:
            delay = self.chances.random() * 0.1
            self._reach(other, delay, lambda other=other: self.members[other].closed(node, self.now))

    def _refuse(self, node: int, other: int) -> None:
        if node not in self.dead and self.now < self.without_agent[node]:
            self._reach(other, 0.01, lambda: self.members[other].refused(node, self.now))
            self.at(self.now + 0.5 + 0.5 * self.chances.random(), lambda: self._refuse(node, other))

    def _acts(self, node: int) -> bool:
        return node not in self.dead and self.now >= self.without_agent.get(node, 0.0)

    def _resumes(self, node: int) -> float:
        """Returns the time at which a stopped agent goes on; 0.0 if it isn't stopped."""
        stops = [h for h in self.harms if h.kind == "stop" and node in h.nodes and h.begin <= self.now < h.end]
        return max((harm.end for harm in stops), default=0.0)

    def _beat(self, node: int) -> None:
        if node in self.dead:
            return
        next_beat = self.now + BEAT_EVERY + 0.05 * self.chances.random() ** 4
        self.at(max(next_beat, self._resumes(node)), lambda: self._beat(node))
        if not self._acts(node) or self._resumes(node):
            return
        members = self.members[node]
        self.events[node] += [(self.now, event) for event in members.tick(self.now)]
        hears = members.hears(self.now)
        harms = [harm for harm in self.harms if harm.begin <= self.now < harm.end]
        for other in members.neighbours:
            if self.chances.random() < self.drops or any(harm.cuts(node, other, self.now) for harm in harms):
                continue
            delay = self.chances.random() * (0.3 if self.chances.random() < 0.02 else 0.02)
            self._reach(other, delay, lambda other=other: self.members[other].heard(node, self.now, hears))

    def _reach(self, node: int, delay: float, do: Callable[[], None]) -> None:
        """Lets something reach an agent: after its pause if it is stopped, never if it is gone."""

        def arrive() -> None:
            resumes = self._resumes(node)
            if resumes:
                self.at(resumes + 0.1 * self.chances.random(), arrive)
            elif self._acts(node):
                do()

        self.at(self.now + delay, arrive)
