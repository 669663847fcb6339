"""Simulates nodes that train and keep common steps, on a virtual clock, over a network that loses and delays beats."""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Callable
from typing import NamedTuple

from rekindle.agent import common_step
from rekindle.agent.common_step import CommonStep, Own, Told
from rekindle.agent.copier import _PATIENCE, AGENT_AWAY
from rekindle.peers.membership import BEAT_EVERY, SUSPECT, Membership


class Harm(NamedTuple):
    """A disturbance of a while: nodes are stopped or cut off, agents are ended, copies fail, or training stands still.

    Nodes that skip leave out snapshots. One that loses its power loses its memory, for good: its harm never ends.
    """

    kind: str
    """"stop", "cut", "agent", "copies", "stall", "skip" or "power"."""
    nodes: tuple[int, ...]
    begin: float
    end: float


class SimulatedNode:
    """One node: the snapshots and copies in its memory, which its notes keep as slots do, and its agent."""

    def __init__(self, number: int, count: int, every: int) -> None:
        self.number, self.count, self.every = number, count, every
        self.neighbours = Membership(number, count, 0.0).neighbours
        self.steps: list[int] = []
        self.copies: set[int] = set()
        self.noted = Told()
        self.begin_agent()

    def begin_agent(self) -> None:
        """Begins with what the agent before has noted."""
        noted = self.noted
        former = Told(step=noted.step, safe=noted.safe, drain=noted.drain)
        self.common = CommonStep(self.number, range(self.count), copies=True, every=self.every, former=former)
        self.words: dict[int, Told] = {}
        self.heard_at: dict[int, float] = {}
        self.failed = self.copying = self.awaited = (-1, -1)
        self.awaited_at = math.inf

    def save(self, step: int) -> None:
        """Saves as ranks do: the newest snapshot stays, and those that the note names."""
        copied = min((at for at in self.steps if at >= self.noted.step >= 0), default=-1)
        kept = {self.noted.safe, copied, max(self.steps, default=-1)}
        self.steps = [at for at in self.steps if at in kept] + [step]

    def make_room(self) -> None:
        """Gives up all copies but one, as the copier's slots do before a write."""
        kept = self.noted.safe if self.noted.safe in self.copies else max(self.copies, default=-1)
        self.copies &= {kept}

    def holds(self, step: int) -> bool:
        return step in self.steps and step in self.copies


class SimulatedSteps:
    """Nodes that train in step, each ``step_seconds``, and whose copies take ``copy_seconds`` or a little more."""

    def __init__(self, count: int, chances: random.Random, step_seconds: float, copy_seconds: float) -> None:
        self.chances, self.step_seconds, self.copy_seconds = chances, step_seconds, copy_seconds
        self.every, self.drops = 1, 0.03
        self.harms: list[Harm] = []
        self.nodes = [SimulatedNode(number, count, self.every) for number in range(count)]
        self.now, self.step, self.next_drain, self._number = 0.0, 0, 0.0, 0
        self.drained: dict[int, set[int]] = {}
        """By step marked for storage: the nodes that had it in memory when they heard of that."""
        self.safe: list[tuple[float, int]] = []
        """Times at which a step was first called safe, and the step."""
        self.settled: dict[int, float] = {}
        """By step that was called safe: when all nodes that were there knew it, or a later one, to be."""
        self._todo: list[tuple[float, int, Callable[[], None]]] = []

    def at(self, time: float, do: Callable[[], None]) -> None:
        self._number += 1
        heapq.heappush(self._todo, (time, self._number, do))

    def run(self, seconds: float) -> None:
        self.at(0.5, self._train)
        for node in self.nodes:
            self.at(self.chances.random() * BEAT_EVERY, lambda node=node: self._beat(node))
        for harm in self.harms:
            for number in harm.nodes:
                if harm.kind == "agent":
                    self.at(harm.end, self.nodes[number].begin_agent)
                elif harm.kind == "power":
                    self.at(harm.begin, lambda number=number: self._lose(self.nodes[number]))
        while self._todo[0][0] < seconds:
            self.now, _, do = heapq.heappop(self._todo)
            do()
            self._check()

    def _lose(self, node: SimulatedNode) -> None:
        node.steps, node.copies = [], set()

    def _is_harmed(self, kind: str, node: int) -> float:
        """Returns when the harm of a node ends; 0.0 if there is none."""
        ends = [h.end for h in self.harms if h.kind == kind and node in h.nodes and h.begin <= self.now < h.end]
        return max(ends, default=0.0)

    def _are_parted(self, one: int, other: int) -> bool:
        return bool(self._is_harmed("cut", one)) != bool(self._is_harmed("cut", other))

    def _train(self) -> None:
        self.at(max(self.now + self.step_seconds, self._is_harmed("stall", 0)), self._train)
        self.step += 1
        for node in self.nodes:
            if not self._is_harmed("skip", node.number) or self.step % 3:
                delay = self.chances.random() * min(0.1, self.step_seconds)
                self.at(self.now + delay, lambda node=node, step=self.step: self._save(node, step))

    def _save(self, node: SimulatedNode, step: int) -> None:
        if not self._is_harmed("power", node.number):
            node.save(step)

    def _beat(self, node: SimulatedNode) -> None:
        resumes = max(self._is_harmed(kind, node.number) for kind in ("stop", "agent", "power"))
        self.at(max(self.now + BEAT_EVERY + 0.05 * self.chances.random() ** 4, resumes), lambda: self._beat(node))
        if resumes:
            return
        self._tick(node)
        told = node.common.told
        for other in node.neighbours:
            if not self._are_parted(node.number, other) and self.chances.random() >= self.drops:
                delay = self.chances.random() * (0.3 if self.chances.random() < 0.02 else 0.02)
                self.at(self.now + delay, lambda other=other: self._hear(self.nodes[other], node.number, told))

    def _hear(self, node: SimulatedNode, number: int, told: Told) -> None:
        resumes = self._is_harmed("stop", node.number)
        if resumes:
            self.at(resumes + 0.1 * self.chances.random(), lambda: self._hear(node, number, told))
        elif not self._is_harmed("agent", node.number) and not self._is_harmed("power", node.number):
            node.words[number], node.heard_at[number] = told, self.now

    def _tick(self, node: SimulatedNode) -> None:
        heard, node.words = node.words, {}
        there = {at for at in node.neighbours if self.now - node.heard_at.get(at, 0.0) < SUSPECT}
        before, kept = node.common.told, frozenset(at for at in node.steps if at in node.copies)
        own = Own(frozenset(node.steps), kept, node.failed == (before.round, before.step))
        leads = all(number > node.number for number in there)
        due = leads and self.now >= self.next_drain
        node.common.tick(own, self.now, heard.values(), leads=leads, calm=len(there) == len(node.neighbours), due=due)
        told = node.noted = node.common.told
        if told.drain > before.drain:
            self.next_drain = max(self.next_drain, self.now + 3.0)
        if told.drain in node.steps:
            self.drained.setdefault(told.drain, set()).add(node.number)
        if told.safe > (self.safe[-1][1] if self.safe else -1):
            self.safe.append((self.now, told.safe))
        self._copy(node, told)

    def _check(self) -> None:
        """Each node must hold what it calls safe, and all that are there the newest step that anybody has called so.

        If they were parted for longer than a step is kept, before all of them knew, they may differ until the next one.
        """
        there = [node for node in self.nodes if not self._is_harmed("power", node.number)]
        for node in there:
            safe = node.common.told.safe
            assert safe < 0 or node.holds(safe), f"node {node.number} lacks step {safe}, its own, at {self.now:.2f}"
        if self.safe:
            at, step = self.safe[-1]
            if all(node.common.told.safe >= step for node in there):
                self.settled.setdefault(step, self.now)
            if not self._were_parted(at, self.settled.get(step, self.now)):
                lacking = [node.number for node in there if not node.holds(step)]
                assert not lacking, f"step {step} is safe, and nodes {lacking} lack it at {self.now:.2f}"

    def _were_parted(self, begin: float, end: float) -> bool:
        """True if a cut after which two nodes may have led was on between two times, or had hardly ended."""
        long = (h for h in self.harms if h.kind == "cut" and h.end - h.begin > common_step._GRACE)
        return any(harm.begin < end and begin < harm.end + SUSPECT for harm in long)

    def _copy(self, node: SimulatedNode, told: Told) -> None:
        name, step = (told.round, told.step), told.step
        if not node.common.is_open or step not in node.steps or step in node.copies or node.copying == name:
            return
        source = self.nodes[(node.number - len(self.nodes) // 2) % len(self.nodes)]
        if node.failed == name or not self._answers(source, node, name):
            return
        if step not in source.steps:
            if max(source.steps, default=-1) > step:
                node.failed = name
            return
        node.make_room()
        node.copying = name
        fails = bool(self._is_harmed("copies", node.number))
        seconds = self.copy_seconds * (1 + 0.3 * self.chances.random())

        def end() -> None:
            if node.copying == name:
                node.copying = (-1, -1)
                now = node.common.told
                if fails:
                    node.failed = name
                elif (now.round, now.step) == name and node.common.is_open and self._answers(source, node, name):
                    node.copies.add(step)

        self.at(self.now + seconds, end)

    def _answers(self, source: SimulatedNode, node: SimulatedNode, name: tuple[int, int]) -> bool:
        """True if the source has an agent that can be reached. A node that has waited too long gives the copy up."""
        unreached = self._is_harmed("power", source.number) or self._are_parted(source.number, node.number)
        if not unreached and not self._is_harmed("agent", source.number):
            node.awaited = (-1, -1)
            return True
        if node.awaited != name:
            node.awaited, node.awaited_at = name, self.now
        if self.now - node.awaited_at > (_PATIENCE if unreached else AGENT_AWAY):
            node.failed = name
        return False
